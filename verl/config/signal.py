"""The group ``algorithm``: how rewards become advantages.

The dataclasses are the schema, ``configs/`` holds the values. There are no defaults here, so that every value has one
home.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from verl.config.checks import (
    Group,
    NotNegativeFloat,
    PositiveFloat,
    Probability,
    own_or,
    require_own_options,
)
from verl.config.rollout_correction import RolloutCorrectionConfig

KLType = Literal[
    "kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "kl+", "k1+", "abs+", "mse+", "k2+", "low_var_kl+", "k3+"
]

AdvEstimator = Literal[
    "grpo",
    "rloo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "gae",
    "gpg",
    "opo",
    "grpo_passk",
    "optimal_token_baseline",
    "tir_optimal_token_baseline",
]
TOKEN_BASELINES: list[AdvEstimator] = ["optimal_token_baseline", "tir_optimal_token_baseline"]
GROUP_ESTIMATORS: list[AdvEstimator] = ["grpo", "rloo", "reinforce_plus_plus_baseline", "gpg", "opo", *TOKEN_BASELINES]
"""Estimators that compare the responses to one prompt; of a single one they keep the reward as it is. An estimator of
the user's own decides for itself how many it needs."""


@dataclass(frozen=True)
class KLControlConfig(Group):
    """The weight of the KL divergence in the reward."""

    type: Literal["fixed", "adaptive"]
    """``fixed``, or ``adaptive``: the weight grows while the divergence is above its target, and shrinks below it."""
    kl_coef: NotNegativeFloat
    """The weight; with ``adaptive`` the weight at the start."""
    target_kl: PositiveFloat
    """Target of ``adaptive``: the divergence per response token, in nats."""
    horizon: PositiveFloat
    """Responses after which ``adaptive`` has changed the weight by a fifth, if the divergence is off by 20% or more;
    larger is slower."""

    def check(self) -> None:
        fix = "adaptive control multiplies it, so it must be above 0"
        self.require(self.type == "fixed" or self.kl_coef > 0, "kl_coef", fix)


@dataclass(frozen=True)
class FilterGroupsConfig(Group):
    """Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): groups without a learning signal are replaced."""

    enable: bool
    """Drop the prompts whose responses all have the same ``metric``, and sample other prompts in their place."""
    metric: Literal["acc", "score", "seq_reward", "seq_final_reward"]
    """``acc``: whether the response is correct; ``score``: the verifier's score; ``seq_reward``: the whole reward, with
    that of the reward model and the overlong penalty; ``seq_final_reward``: the same less the KL penalty, which is
    known only after filtering, so it needs ``use_kl_in_reward=false`` and is then ``seq_reward``. Neither
    ``trainer.method`` nor rank shaping counts: they see the step's responses once these are chosen."""
    max_num_gen_batches: int
    """Most batches of ``data.gen_batch_size`` prompts to sample for one step; the step then learns from the groups
    found so far, where veRL would end the run. 0 or less: no limit, but a run ends that finds nothing to learn from in
    100 batches. Batches after the first do not count towards an epoch."""


@dataclass(frozen=True)
class PFPPOConfig(Group):
    """Which responses ``algorithm.use_pf_ppo`` draws."""

    reweight_method: Literal["pow", "max_min", "max_random"]
    """Weight of a response of reward r: ``pow``, abs(r) to the power of ``weight_pow``; ``max_min``, 1 for the largest
    and the smallest reward of the batch and hardly anything for others; ``max_random``, 0.4 for the largest, 0.1 for
    others."""
    weight_pow: NotNegativeFloat
    """Exponent of ``pow``, at least 0."""


@dataclass(frozen=True)
class AlgorithmConfig(Group):
    """How rewards become advantages."""

    adv_estimator: Annotated[str, own_or(get_args(AdvEstimator))]
    """Advantage estimator: ``grpo``, ``rloo``, ``reinforce_plus_plus``, ``reinforce_plus_plus_baseline``, ``remax``
    (the baseline is the greedy response, one more response per prompt), ``gae`` (PPO, with the critic of the group
    ``critic``), ``gpg`` (centred, and scaled by the share of scores that are not 0; arXiv 2504.02546), ``opo`` (centred
    at the mean weighted by length; arXiv 2505.23585), ``grpo_passk`` (the best response's lead over the second best;
    arXiv 2503.19595), ``optimal_token_baseline`` (a baseline of its own for each token, that of least variance) or
    ``tir_optimal_token_baseline`` (the same, and none where only one response goes on). Or your own, as
    ``module:attribute`` or ``file.py:attribute`` (docs/extending.md), which has no critic and may need any number of
    responses to a prompt."""
    adv_estimator_kwargs: dict[str, Any]
    """Keyword arguments of your own ``adv_estimator``."""
    norm_adv_by_std_in_grpo: bool
    """Divide the group-centred score by the group's standard deviation (``grpo``, ``grpo_passk``); false is Dr.GRPO."""
    gamma: Probability
    """Discount per token of ``reinforce_plus_plus`` and ``gae``, in [0, 1]."""
    lam: Probability
    """Lambda of ``gae``, in [0, 1]: 0 trusts the critic alone, 1 the rewards alone."""
    use_kl_in_reward: bool
    """Subtract the KL divergence from the reference policy from every token's reward."""
    kl_penalty: Annotated[str, own_or(get_args(KLType))]
    """Estimator of that divergence, as ``actor.kl_loss_type``; rewards have no gradient, so a ``+`` changes nothing."""
    kl_penalty_kwargs: dict[str, Any]
    """Keyword arguments of your own ``kl_penalty``."""
    kl_ctrl: KLControlConfig
    filter_groups: FilterGroupsConfig
    rollout_correction: RolloutCorrectionConfig
    use_pf_ppo: bool
    """Update on as many responses as were sampled, drawn again from them with replacement by their rewards (PF-PPO,
    arXiv 2409.06957); with ``gae``."""
    pf_ppo: PFPPOConfig

    def check(self) -> None:
        require_own_options("adv_estimator", self.adv_estimator, self.adv_estimator_kwargs)
        require_own_options("kl_penalty", self.kl_penalty, self.kl_penalty_kwargs)
        drawn = not self.use_pf_ppo or self.adv_estimator == "gae"
        self.require(drawn, "use_pf_ppo", "belongs to algorithm.adv_estimator=gae; set it to false")
