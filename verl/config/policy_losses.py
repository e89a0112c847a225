"""The policy losses: their names, and what each of them takes."""

CLIP_RANGES = {"gspo": (3e-4, 4e-4), "gmpo": (0.4, 0.4)}
"""``actor.policy_loss`` -> lower and upper clip range: of GSPO (arXiv 2507.18071, section 5.1), whose ratio is that of
a mean over tokens, and of GMPO (arXiv 2507.20673), in log-ratios. The others have PPO's (arXiv 1707.06347)."""

LOSS_OPTIONS: dict[str, tuple[str, ...]] = {
    "ppo_clip": ("clip_low", "clip_high", "clip_ratio_c"),
    "gspo": ("clip_low", "clip_high"),
    "cispo": ("clip_low", "clip_high"),
    "gmpo": ("clip_low", "clip_high"),
    "gpg": (),
    "sapo": ("tau_pos", "tau_neg"),
    "clip_cov": ("clip_low", "clip_high", "clip_cov_ratio", "clip_cov_lb", "clip_cov_ub"),
    "kl_cov": ("kl_cov_ratio", "ppo_kl_coef"),
}
"""``actor.policy_loss`` -> the options that it reads."""

SEQUENCE_LOSSES = ("gspo", "gmpo", "sapo")
"""Values of ``actor.policy_loss`` whose objective is the mean over responses of each one's mean."""
