"""Configuration of the policy update: the schema of ``configs/actor/``."""

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from verl.config.checks import (
    Group,
    NotNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Share,
    custom_or,
    require,
    require_custom_kwargs,
    rule,
)
from verl.config.common import OptimConfig
from verl.config.signal import KL_TYPES

CLIP_RANGES = {
    "gspo": (3e-4, 4e-4),
    "gmpo": (0.4, 0.4),
    "cispo": (1.0, 0.2),
    "dppo_tv": (0.15, 0.15),
    "dppo_kl": (0.05, 0.05),
}
"""Maps ``actor.policy_loss`` to the default lower and upper clip range. GSPO (arXiv 2507.18071, section 5.1) clips the
mean ratio over a response, and GMPO (arXiv 2507.20673) clips log-ratios. CISPO (arXiv 2506.13585) has no lower bound.
DPPO (arXiv 2602.04879) bounds divergences. Other losses use PPO's range (arXiv 1707.06347)."""

LOSS_OPTIONS: dict[str, tuple[str, ...]] = {
    "ppo_clip": ("clip_low", "clip_high", "clip_ratio_c"),
    "gspo": ("clip_low", "clip_high"),
    "cispo": ("clip_low", "clip_high"),
    "gmpo": ("clip_low", "clip_high"),
    "gpg": (),
    "dro": ("dro_beta",),
    "dppo_tv": ("clip_low", "clip_high", "clip_ratio_c"),
    "dppo_kl": ("clip_low", "clip_high", "clip_ratio_c"),
    "sapo": ("tau_pos", "tau_neg"),
    "clip_cov": ("clip_low", "clip_high", "clip_cov_ratio", "clip_cov_lb", "clip_cov_ub"),
    "kl_cov": ("kl_cov_ratio", "ppo_kl_coef"),
}
"""Maps ``actor.policy_loss`` to the options that it uses."""

SEQUENCE_LOSSES = ("gspo", "gmpo", "sapo")
"""Policy losses that, by default, average first over the tokens of each response and then over responses."""

LossAggMode = Literal["token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]


@dataclass(frozen=True)
class LearnerConfig(Group):
    """Update options shared by the policy and the critic."""

    ppo_mini_batch_size: PositiveInt
    """Number of prompts per optimizer step over all workers, at most ``data.train_batch_size``. It need not divide the
    batch size or be a multiple of the number of workers, because the workers' shares are padded with masked samples."""
    ppo_epochs: PositiveInt
    """Number of passes over each rollout batch."""
    micro_batch_size_per_gpu: PositiveInt
    """Number of responses per forward and backward pass on one worker. This affects memory and speed, not the gradient.
    Unlike in veRL, it need not divide a worker's share of a mini-batch: a smaller last pass is weighted by its size."""
    use_dynamic_bsz: bool
    """Fill micro-batches by token count instead of response count, and balance tokens across workers. Responses that
    share a prompt (``model.share_prompts``) stay together. The gradient does not change."""
    ppo_max_token_len_per_gpu: PositiveInt
    """Maximum number of prompt and response tokens per forward and backward pass on one worker if ``use_dynamic_bsz``
    is set. If workers split sequences (``model.ulysses_sequence_parallel_size``), the sum of their limits must fit a
    whole sequence. A shared prompt counts once, plus 1/16 of its length for each additional response."""
    optim: OptimConfig


@dataclass(frozen=True)
class ActorConfig(LearnerConfig):
    """Options of the policy update."""

    log_prob_micro_batch_size_per_gpu: PositiveInt
    """Number of responses per forward pass on one worker when only log-probabilities are computed."""
    log_prob_max_token_len_per_gpu: PositiveInt
    """Like ``ppo_max_token_len_per_gpu``, but for forward passes that compute only log-probabilities."""
    policy_loss: Annotated[str, custom_or(list(LOSS_OPTIONS))]
    """``ppo_clip`` clips the probability ratio of each token, and ``gspo`` the ratio of the whole response. ``cispo``
    weights the log-probability of each token by the token's clipped ratio. ``gmpo`` takes the geometric mean of a
    response's ratios, with log-ratios clipped to [-``clip_ratio_low``, ``clip_ratio_high``]. ``gpg`` uses the
    log-probability without a ratio, as in REINFORCE (arXiv 2504.02546), and ``dro`` adds the squared log-ratio
    (``dro_beta``; arXiv 2405.19107). ``dppo_tv`` is like ``cispo``, but excludes tokens whose probability has changed
    too much; ``dppo_kl`` excludes tokens whose binary KL divergence is too large (arXiv 2602.04879). ``sapo`` smoothly
    reduces a token's gradient as its ratio moves away from 1 (``tau_pos``, ``tau_neg``; arXiv 2511.20347). ``clip_cov``
    is ``ppo_clip`` without a few randomly chosen tokens whose advantage and log-probability have a large covariance;
    ``kl_cov`` does not clip, but adds a KL penalty to the tokens with the largest covariance (arXiv 2505.22617). Other
    values name custom functions, ``module:function`` or ``file.py:function`` (docs/extending.md)."""
    policy_loss_kwargs: dict[str, Any]
    """Additional keyword arguments of a custom policy loss."""
    clip_ratio_low: float | None
    """Lower clip range, in (0, 1]: the probability ratio is clipped at 1 - ``clip_ratio_low``. For ``gmpo``, it applies
    to the log-ratio and may be any positive number. For ``dppo_tv``, it bounds the decrease in probability, and for
    ``dppo_kl`` the divergence of tokens with negative advantages. Null selects the default of ``policy_loss``: 3e-4 for
    ``gspo``, 0.4 for ``gmpo``, 1 (no bound) for ``cispo``, 0.15 for ``dppo_tv``, 0.05 for ``dppo_kl``, and 0.2 for
    other losses."""
    clip_ratio_high: PositiveFloat | None
    """Upper clip range: the probability ratio is clipped at 1 + ``clip_ratio_high``. For ``dppo_tv``, it bounds the
    increase in probability, and for ``dppo_kl`` the divergence of tokens with positive advantages. Null selects 4e-4
    for ``gspo``, 0.4 for ``gmpo``, 0.15 for ``dppo_tv``, 0.05 for ``dppo_kl``, and 0.2 for other losses."""
    clip_ratio_c: Annotated[float, rule(lambda clip: clip > 1, "must be above 1, or null")] | None
    """Dual-clip bound of ``ppo_clip``, above 1: the loss of a token with a negative advantage A is at most
    -``clip_ratio_c`` * A. For ``dppo_tv`` and ``dppo_kl``, it is the maximum weight of a token. Null sets no limit."""
    tau_pos: PositiveFloat
    """Temperature of ``sapo`` for positive advantages, above 0. The gradient decays faster at larger temperatures."""
    tau_neg: PositiveFloat
    """Like ``tau_pos``, but for zero and negative advantages."""
    dro_beta: PositiveFloat | None
    """Weight of half the squared log-ratio. It must be above 0 for ``dro``, and null for other losses."""
    clip_cov_ratio: Share
    """Share of a micro-batch's tokens that ``clip_cov`` excludes, in (0, 1]."""
    clip_cov_lb: float
    """Lower bound on the covariance of tokens that ``clip_cov`` may exclude."""
    clip_cov_ub: float
    """Upper bound on the covariance of tokens that ``clip_cov`` may exclude."""
    kl_cov_ratio: Share
    """Share of a micro-batch's tokens that ``kl_cov`` penalises, in (0, 1]."""
    ppo_kl_coef: NotNegativeFloat
    """Weight of ``kl_cov``'s KL penalty, at least 0."""
    loss_agg_mode: LossAggMode | None
    """Aggregation of per-token losses, including the entropy and KL terms. ``token-mean`` averages over all response
    tokens of the optimizer step, and ``token-sum`` adds them up. The other modes average one value per response over
    responses: the mean of its tokens (``seq-mean-token-mean``), their sum (``seq-mean-token-sum``), or the sum divided
    by ``data.max_response_length`` (``seq-mean-token-sum-norm``, Dr.GRPO). Null selects ``seq-mean-token-mean`` for
    ``gspo``, ``gmpo`` and ``sapo``, and ``token-mean`` for other losses. A custom policy loss with one value per
    response is always averaged over responses."""
    entropy_coeff: NotNegativeFloat
    """Weight of the entropy bonus in the loss, at least 0."""
    bypass_mode: bool
    """Use the log-probabilities recorded by the rollout engine for probability ratios and the KL divergence in the
    reward, instead of recomputing them before the update. This saves a forward pass and omits the metrics
    ``rollout_corr/*``, unless a rejection rule, ``algorithm.rollout_correction.rollout_is_batch_normalize``, a token
    metric or the advantage estimator needs that pass. The ratio already corrects for the mismatch with the engine, so
    ``algorithm.rollout_correction.rollout_is`` requires ``policy_loss=gpg``. Its weights then come from the policy
    being trained."""
    use_kl_loss: bool
    """Add the KL divergence from the reference policy to the loss."""
    kl_loss_coef: NotNegativeFloat
    """Weight of the KL divergence in the loss, at least 0."""
    kl_loss_type: Annotated[str, custom_or(KL_TYPES)]
    """Per-token estimator of the KL divergence if ``use_kl_loss=true``: ``kl`` or ``k1``, the log-ratio; ``abs``, its
    absolute value; ``mse`` or ``k2``, half its square; ``low_var_kl`` or ``k3``, whose log-ratios are clamped to [-20,
    20] and whose values are clamped to at most 10, where the gradient is 0. The suffix ``+``, as in ``k3+``, keeps the
    value but uses the gradient of ``k2``, which is never clamped and is the exact gradient on policy. ``k1`` without
    ``+`` has a zero-mean gradient on policy and prints a warning. Other values name custom estimators,
    ``module:attribute`` or ``file.py:attribute`` (docs/extending.md)."""
    kl_loss_type_kwargs: dict[str, Any]
    """Keyword arguments of a custom ``kl_loss_type``."""
    use_unbiased_kl: bool
    """Weight the KL estimate by the probability ratio between the policy and the sampling policy, with log-ratios
    clamped to [-20, 20]. This keeps the gradient unbiased in later mini-batches and epochs (DeepSeek-V3.2, arXiv
    2512.02556) and corrects the gradient of ``k1``. For ``k1``, ``k3``, ``abs`` and custom estimators, the gradient
    also flows through the ratio."""

    def check(self) -> None:
        loss = self.policy_loss
        fix = f"are those of a policy loss of your own, and {loss} is not; set it to {{}}"
        self.require(not self.policy_loss_kwargs or ":" in loss, "policy_loss_kwargs", fix)
        require_custom_kwargs("kl_loss_type", self.kl_loss_type, self.kl_loss_type_kwargs)
        low, most = self.clip_range[0], math.inf if loss == "gmpo" else 1
        require(0 < low <= most, "clip_ratio_low", low, "must be in (0, 1]; with gmpo it may be greater")
        dual = self.clip_ratio_c is None or "clip_ratio_c" in LOSS_OPTIONS.get(loss, ())
        self.require(dual, "clip_ratio_c", f"{loss} has no dual clip; set it to null")
        self.require((self.dro_beta is not None) == (loss == "dro"), "dro_beta", "is used by dro, and by dro alone")
        below = f"must be below actor.clip_cov_ub={self.clip_cov_ub:g}"
        self.require(self.clip_cov_lb < self.clip_cov_ub, "clip_cov_lb", below)

    @property
    def loss_options(self) -> dict[str, float | None]:
        """Non-tensor arguments of ``policy_loss``."""
        low, high = self.clip_range
        clips = {"clip_low": low, "clip_high": high}
        names = LOSS_OPTIONS.get(self.policy_loss, ())
        return {name: clips[name] if name in clips else getattr(self, name) for name in names}

    @property
    def clip_range(self) -> tuple[float, float]:
        """Values of ``clip_ratio_low`` and ``clip_ratio_high``, or the policy loss's defaults if they are null."""
        low, high = CLIP_RANGES[self.policy_loss] if self.policy_loss in CLIP_RANGES else (0.2, 0.2)
        low = low if self.clip_ratio_low is None else self.clip_ratio_low
        return low, high if self.clip_ratio_high is None else self.clip_ratio_high

    @property
    def clips_nothing(self) -> bool:
        """Whether GSPO's clip range is too wide to clip any mean ratio, such as a range for per-token ratios."""
        return self.policy_loss == "gspo" and max(self.clip_range) >= 0.05

    @property
    def kl_gradient_vanishes(self) -> bool:
        """Whether the gradient of the KL loss has mean 0 on policy."""
        k1 = self.use_kl_loss and self.kl_loss_coef > 0 and self.kl_loss_type in ("kl", "k1")
        return k1 and not self.use_unbiased_kl

    @property
    def loss_aggregation(self) -> LossAggMode:
        """Value of ``loss_agg_mode``, or the policy loss's default if it is null."""
        return self.loss_agg_mode or ("seq-mean-token-mean" if self.policy_loss in SEQUENCE_LOSSES else "token-mean")
