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

CLIP_RANGES = {"gspo": (3e-4, 4e-4), "gmpo": (0.4, 0.4), "cispo": (1.0, 0.2)}
"""``actor.policy_loss`` -> lower and upper clip range: of GSPO (arXiv 2507.18071, section 5.1), whose ratio is that of
a mean over tokens, of GMPO (arXiv 2507.20673), in log-ratios, and of CISPO (arXiv 2506.13585), without a lower
bound. The others have PPO's (arXiv 1707.06347)."""

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

LossAggMode = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]


@dataclass(frozen=True)
class LearnerConfig(Group):
    """How the policy and the critic are updated."""

    ppo_mini_batch_size: PositiveInt
    """Prompts per optimizer step, over all workers; at most ``data.train_batch_size``. Need not divide it, nor be a
    multiple of the workers, whose shares are filled up with rows that nothing is learned from."""
    ppo_epochs: PositiveInt
    """Passes over each rollout batch."""
    micro_batch_size_per_gpu: PositiveInt
    """Responses per forward and backward pass on one worker; changes memory and speed, never the gradient. Need not
    divide the worker's share of a mini-batch (veRL refuses that): the last pass takes what is left, with its weight."""
    use_dynamic_bsz: bool
    """Fill micro-batches by their number of tokens instead of responses, and balance tokens over workers: of rows, or
    of whole prompts where responses share them (``model.share_prompts``). Does not change the gradient."""
    ppo_max_token_len_per_gpu: PositiveInt
    """Most tokens, prompt and response, per forward and backward pass on one worker with ``use_dynamic_bsz``. Workers
    that split sequences (``model.ulysses_sequence_parallel_size``) add up; together they hold at least one whole
    sequence. A prompt that several responses share counts once, and a sixteenth for each further one."""
    optim: OptimConfig


@dataclass(frozen=True)
class ActorConfig(LearnerConfig):
    """The policy update."""

    log_prob_micro_batch_size_per_gpu: PositiveInt
    """Responses per forward pass on one worker when only log-probabilities are computed."""
    log_prob_max_token_len_per_gpu: PositiveInt
    """As ``ppo_max_token_len_per_gpu``, when only log-probabilities are computed."""
    policy_loss: Annotated[str, custom_or(list(LOSS_OPTIONS))]
    """``ppo_clip`` clips the probability ratio of each token, ``gspo`` that of the whole response; ``cispo`` weights
    the log-probability of each token by its clipped ratio; ``gmpo`` takes the geometric mean of a response's ratios,
    each of whose logarithms is clipped to [-``clip_ratio_low``, ``clip_ratio_high``]; ``gpg`` is the log-probability
    itself, without a ratio, as in REINFORCE (arXiv 2504.02546); ``sapo`` lets each token's gradient fade smoothly as
    its ratio leaves 1 (``tau_pos``, ``tau_neg``; arXiv 2511.20347); ``clip_cov`` is ``ppo_clip`` without a few random
    tokens of large covariance of advantage and log-probability, and ``kl_cov``, which does not clip, penalises the
    tokens where it is largest by their KL divergence (arXiv 2505.22617). Or a function of your own,
    ``module:function`` or ``file.py:function`` (docs/extending.md)."""
    policy_loss_kwargs: dict[str, Any]
    """Further keyword arguments of a policy loss of your own."""
    clip_ratio_low: float | None
    """Lower clip of the probability ratio: 1 - ``clip_ratio_low``, in (0, 1]; of its logarithm with ``gmpo``, any above
    0. Null: what suits ``policy_loss``, 3e-4 for ``gspo``, 0.4 for ``gmpo``, 1 for ``cispo``, which is no bound, and
    0.2 for the others."""
    clip_ratio_high: PositiveFloat | None
    """Upper clip of the probability ratio: 1 + ``clip_ratio_high``. Null: 4e-4 for ``gspo``, 0.4 for ``gmpo`` and 0.2
    for the others."""
    clip_ratio_c: Annotated[float, rule(lambda clip: clip > 1, "must be above 1, or null")] | None
    """Dual clip of ``ppo_clip``, above 1: the loss of a token with a negative advantage A is at most
    -``clip_ratio_c`` * A; null: no bound."""
    tau_pos: PositiveFloat
    """Speed at which the gradient of ``sapo`` fades where the advantage is positive, above 0."""
    tau_neg: PositiveFloat
    """The same where it is not positive."""
    clip_cov_ratio: Share
    """Share of the tokens of a micro-batch that ``clip_cov`` leaves out, in (0, 1]."""
    clip_cov_lb: float
    """They have a covariance above this."""
    clip_cov_ub: float
    """And below this."""
    kl_cov_ratio: Share
    """Share of the tokens of a micro-batch that ``kl_cov`` penalises, in (0, 1]."""
    ppo_kl_coef: NotNegativeFloat
    """Weight of that penalty, at least 0."""
    loss_agg_mode: LossAggMode | None
    """Aggregation of token losses, with entropy and KL divergence. ``token-mean``: the mean over
    all response tokens of the optimizer step; ``seq-mean-token-mean``: the mean over responses of each one's mean;
    ``seq-mean-token-sum``: of each one's sum; ``seq-mean-token-sum-norm``: of each one's sum, divided by
    ``data.max_response_length`` (Dr.GRPO). Null: ``seq-mean-token-mean`` for ``gspo``, ``gmpo`` and ``sapo``,
    ``token-mean`` for the others. A policy loss of your own that returns one number a response is averaged over
    responses, whatever this is."""
    entropy_coeff: NotNegativeFloat
    """Weight of the entropy bonus in the loss, at least 0."""
    bypass_mode: bool
    """Take probability ratios, and the KL divergence in the reward, to the log-probabilities that the rollout engine
    recorded, instead of those of the policy before the update. Saves the pass that computes the latter, and with it
    ``rollout_corr/*`` in the log, unless rejection rules, ``algorithm.rollout_correction.rollout_is_batch_normalize``,
    a metric of tokens or the advantage estimator needs it. The ratio then corrects for the engine by itself;
    ``algorithm.rollout_correction.rollout_is`` is for ``policy_loss=gpg`` alone, whose weights are those of the policy
    as it learns."""
    use_kl_loss: bool
    """Add the KL divergence from the reference policy to the loss."""
    kl_loss_coef: NotNegativeFloat
    """Weight of the KL divergence in the loss, at least 0."""
    kl_loss_type: Annotated[str, custom_or(KL_TYPES)]
    """Estimator of that divergence, by token; it has an effect only with ``use_kl_loss=true``. ``kl`` or ``k1``, the
    log-ratio; ``abs``, its absolute value; ``mse`` or ``k2``, half its square; ``low_var_kl`` or ``k3``, whose
    log-ratio is clamped to [-20, 20] and whose value to 10, where its gradient ends. With the suffix ``+``, as in
    ``k3+``, the same value with the gradient of ``k2``, which is that of the divergence on policy and is never clamped.
    The gradient of ``k1`` alone vanishes on policy, with a warning. Or your own, as ``module:attribute`` or
    ``file.py:attribute`` (docs/extending.md)."""
    kl_loss_type_kwargs: dict[str, Any]
    """Keyword arguments of your own ``kl_loss_type``."""
    use_unbiased_kl: bool
    """Weight that estimate by the probability ratio of the policy to the one that sampled, log-ratio within [-20, 20],
    so that its gradient stays right in later mini-batches and epochs (DeepSeek-V3.2, arXiv 2512.02556). ``k1`` then has
    the right gradient too. The gradient of the weight counts with your own ``kl_loss_type``, as with ``k1`` and
    ``k3``."""

    def check(self) -> None:
        loss = self.policy_loss
        fix = f"are those of a policy loss of your own, and {loss} is not; set it to {{}}"
        self.require(not self.policy_loss_kwargs or self.is_custom_loss, "policy_loss_kwargs", fix)
        require_custom_kwargs("kl_loss_type", self.kl_loss_type, self.kl_loss_type_kwargs)
        low, most = self.clip_range[0], math.inf if loss == "gmpo" else 1
        require(0 < low <= most, "clip_ratio_low", low, "must be in (0, 1]; with gmpo it may be greater")
        dual = self.clip_ratio_c is None or loss == "ppo_clip"
        self.require(dual, "clip_ratio_c", f"{loss} has no dual clip; set it to null")
        below = f"must be below actor.clip_cov_ub={self.clip_cov_ub:g}"
        self.require(self.clip_cov_lb < self.clip_cov_ub, "clip_cov_lb", below)

    @property
    def loss_options(self) -> dict[str, float | None]:
        """Arguments of ``policy_loss`` other than tensors."""
        low, high = self.clip_range
        clips = {"clip_low": low, "clip_high": high}
        names = LOSS_OPTIONS.get(self.policy_loss, ())
        return {name: clips[name] if name in clips else getattr(self, name) for name in names}

    @property
    def is_custom_loss(self) -> bool:
        """Whether ``policy_loss`` is an import path."""
        return ":" in self.policy_loss

    @property
    def clip_range(self) -> tuple[float, float]:
        """``clip_ratio_low`` and ``clip_ratio_high``, or the policy loss's default where they are null."""
        low, high = CLIP_RANGES[self.policy_loss] if self.policy_loss in CLIP_RANGES else (0.2, 0.2)
        low = low if self.clip_ratio_low is None else self.clip_ratio_low
        return low, high if self.clip_ratio_high is None else self.clip_ratio_high

    @property
    def clips_nothing(self) -> bool:
        """Whether the clip range is one of tokens for the ratio of whole responses, which hardly leaves it."""
        return self.policy_loss == "gspo" and max(self.clip_range) >= 0.05

    @property
    def kl_gradient_vanishes(self) -> bool:
        """Whether the KL divergence in the loss has a gradient of mean 0 on policy."""
        k1 = self.use_kl_loss and self.kl_loss_coef > 0 and self.kl_loss_type in ("kl", "k1")
        return k1 and not self.use_unbiased_kl

    @property
    def loss_aggregation(self) -> LossAggMode:
        """``loss_agg_mode``, or that of the policy loss if it is null."""
        return self.loss_agg_mode or ("seq-mean-token-mean" if self.policy_loss in SEQUENCE_LOSSES else "token-mean")
