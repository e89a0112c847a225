"""Defines the option group ``algorithm``, for computing advantages from rewards.

The dataclasses are the schema. The schema has no defaults, so that every value is defined in one place, ``configs/``.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

from verl.config.checks import (
    NAMES_ONCE,
    Group,
    NotNegativeFloat,
    PositiveFloat,
    Probability,
    custom_or,
    require,
    require_choice,
    require_custom_kwargs,
    within,
)

_KL_TYPES = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
KL_TYPES = (*_KL_TYPES, *(f"{name}+" for name in _KL_TYPES))
"""Estimators of a KL divergence; the suffix ``+`` selects the gradient of ``k2``."""

TOKEN_BASELINES = ("optimal_token_baseline", "tir_optimal_token_baseline")
GROUP_ESTIMATORS = ("grpo", "rloo", "reinforce_plus_plus_baseline", "gpg", "opo", *TOKEN_BASELINES)
"""Estimators that compare the responses to a prompt, and use the reward of a single response unchanged. Custom
estimators specify the required group size themselves."""
_OTHERS = ("remax", "gae", "gpg", "opo", "grpo_passk")
ADV_ESTIMATORS = ("grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", *_OTHERS, *TOKEN_BASELINES)

REJECTION_RULES = tuple(f"{part}_k{k}" for part in ("token", "seq_sum", "seq_mean") for k in (1, 2, 3))
REJECTION_RULES += ("seq_max_k2", "seq_max_k3")


@dataclass(frozen=True)
class KLControlConfig(Group):
    """Options for the coefficient of the KL divergence in the reward."""

    type: Literal["fixed", "adaptive"]
    """``fixed``, or ``adaptive``: the coefficient rises if the divergence exceeds its target, and falls otherwise."""
    kl_coef: NotNegativeFloat
    """Coefficient, or the initial coefficient if ``type=adaptive``."""
    target_kl: PositiveFloat
    """Target divergence per response token for ``adaptive``, in nats."""
    horizon: PositiveFloat
    """Number of responses over which ``adaptive`` changes the coefficient by 20% if the divergence differs from its
    target by 20% or more. Larger values adapt more slowly."""

    def check(self) -> None:
        fix = "adaptive control multiplies it, so it must be above 0"
        self.require(self.type == "fixed" or self.kl_coef > 0, "kl_coef", fix)


@dataclass(frozen=True)
class FilterGroupsConfig(Group):
    """Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2), which replaces groups without a learning signal."""

    enable: bool
    """Drop prompts whose responses all have the same ``metric``, and sample responses to other prompts instead."""
    metric: Literal["acc", "score", "seq_reward", "seq_final_reward"]
    """``acc``: whether the response is correct; ``score``: the verifier's score; ``seq_reward``: the total reward,
    including the reward model and the overlong penalty; ``seq_final_reward``: the total reward minus the KL penalty,
    which is known only after filtering, so it requires ``use_kl_in_reward=false`` and then equals ``seq_reward``.
    ``trainer.method`` and rank shaping do not affect the metric, because they run after filtering."""
    max_num_gen_batches: int
    """Maximum number of batches of ``data.gen_batch_size`` prompts to sample per step. At the limit, the step trains on
    the groups collected so far, while veRL ends the run. 0 or less means no limit, but the run ends if 100 batches
    yield nothing to learn from. Only the first batch of a step counts towards the epoch."""


class Rejection(NamedTuple):
    """A rejection rule with bounds on the ratio (k1) or an upper bound on the divergence (k2, k3)."""

    rule: str
    lower: float | None
    upper: float


@dataclass(frozen=True)
class RolloutCorrectionConfig(Group):
    """Corrections for the mismatch between the probabilities of the rollout engine and the trainer.

    The names follow veRL. Truncated importance sampling (``rollout_is``) weights tokens; rejection (``rollout_rs``)
    masks tokens or responses. Rejected tokens are excluded from losses and their denominators, but included in group
    statistics and logs."""

    rollout_is: Literal["token", "sequence"] | None
    """Truncated importance sampling: weight each token's loss by the ratio p_trainer / p_rollout of the token or of the
    whole response, or null to disable it."""
    rollout_is_threshold: Any
    """Maximum importance weight for ``rollout_is``, or a band such as ``"0.5_2.0"``. Token or response weights outside
    the band are set to 0 (IcePop, arXiv 2510.18855)."""
    rollout_is_batch_normalize: bool
    """Divide the importance weights by their batch mean, over tokens or responses depending on ``rollout_is``."""
    rollout_rs: list[str] | None
    """Rejection rules, which are applied together, or null for none. A token has the ratio r = p_rollout / p_trainer,
    with log r clamped to [-20, 20], and k1 = log r, k2 = (log r)^2 / 2, and k3 = 1/r - 1 + log r. ``token_k1``,
    ``token_k2`` and ``token_k3`` mask single tokens; ``seq_sum_k1`` (the ratio of the whole response), ``seq_mean_k1``
    (the geometric mean of token ratios), ``seq_max_k2`` and similar rules mask whole responses."""
    rollout_rs_threshold: list[Any] | None
    """Bounds, one per rule or one for all rules. A k1 rule takes a range for the ratio, such as ``"0.5_2.0"``, or only
    an upper bound, whose inverse is the lower bound. Other rules take an upper bound in nats."""
    rollout_token_veto_threshold: Annotated[float, within("[1e-8, 1)")] | None
    """Threshold in [1e-8, 1), such as 1e-4: if any token's ratio p_trainer / p_rollout is lower, the whole response is
    rejected. Null disables this rule, which is logged as ``seq_max_k1``."""

    def check(self) -> None:
        # Reading the properties raises an error if a value is out of range.
        assert self.rejections is not None and self.weight_bounds

    @property
    def weight_bounds(self) -> dict[str, Any]:
        """Arguments ``cap`` and ``floor`` (0 without a band) for functions that compute importance weights."""
        low, high = _bounds(str(self.rollout_is_threshold))
        fix = "must be a number above 0 and up to 3.4e+38, as in float32, or a band such as 0.5_2.0"
        self.require(0 < (high if low is None else low) <= high <= 3.4e38, "rollout_is_threshold", fix)
        return {"cap": high, "floor": low or 0.0}

    @property
    def rejections(self) -> list[Rejection]:
        """All active rules with their bounds."""
        veto = self.rollout_token_veto_threshold
        return [*self._listed(), *([] if veto is None else [Rejection("seq_max_k1", None, 1 / veto)])]

    def _listed(self) -> list[Rejection]:
        field = "rollout_rs"
        rules, bounds = _entries(self.rollout_rs), _entries(self.rollout_rs_threshold)
        if not rules:
            self.require(not bounds, f"{field}_threshold", "is used only with rollout_rs; set that")
            return []
        NAMES_ONCE(field, rules)
        for rule in rules:
            require_choice(field, rule, REJECTION_RULES)
        count = f"needs one threshold, or one for each of the {len(rules)} rules"
        self.require(len(bounds) in (1, len(rules)), f"{field}_threshold", count)
        bounds = bounds * len(rules) if len(bounds) == 1 else bounds
        return [_rejection(f"{field}_threshold", *pair) for pair in zip(rules, bounds, strict=True)]


def _entries(values: list[Any] | None) -> list[str]:
    """Return the entries as text, split at commas, because veRL puts several rules into one entry."""
    return [part.strip() for value in values or [] for part in str(value).split(",")]


def _bounds(text: str) -> tuple[float | None, float]:
    """Parse ``upper`` or ``lower_upper`` and return both bounds, or -1 for both if one is not a number."""
    lower, _, upper = text.rpartition("_")
    try:
        return (float(lower) if lower else None), float(upper)
    except ValueError:
        return -1.0, -1.0


def _rejection(field: str, rule: str, bound: str) -> Rejection:
    ratio = rule.endswith("k1")
    fix = f"{rule} takes " + ("two ratios such as 0.5_2.0, or the upper one" if ratio else "one number in nats")
    low, high = _bounds(bound)
    require(0 < high < float("inf"), field, bound, fix)
    if not ratio:
        require(low is None, field, bound, fix)
        return Rejection(rule, None, high)
    low = 1 / high if low is None else low
    require(0 < low < high, field, bound, f"{fix}; the lower one must be above 0 and below the upper one")
    return Rejection(rule, low, high)


@dataclass(frozen=True)
class PFPPOConfig(Group):
    """Options for the weights with which ``algorithm.use_pf_ppo`` resamples responses."""

    reweight_method: Literal["pow", "max_min", "max_random"]
    """Sampling weight of a response with reward r. ``pow``: abs(r) to the power of ``weight_pow``; ``max_min``: 1 for
    the batch's largest and smallest reward, almost 0 for others; ``max_random``: 0.4 for the largest, 0.1 for
    others."""
    weight_pow: NotNegativeFloat
    """Exponent of ``pow``, at least 0."""


@dataclass(frozen=True)
class AlgorithmConfig(Group):
    """Options for computing advantages from rewards."""

    adv_estimator: Annotated[str, custom_or(ADV_ESTIMATORS)]
    """Advantage estimator: ``grpo``, ``rloo``, ``reinforce_plus_plus``, ``reinforce_plus_plus_baseline``, ``remax``
    (uses an additional greedy response to each prompt as the baseline), ``gae`` (PPO with the critic of the group
    ``critic``), ``gpg`` (centred, and scaled by the share of nonzero scores; arXiv 2504.02546), ``opo`` (centred at the
    length-weighted mean; arXiv 2505.23585), ``grpo_passk`` (rewards the best response by its lead over the second best;
    arXiv 2503.19595) or ``optimal_token_baseline`` (a minimum-variance baseline per token position of the policy, or no
    baseline if only one response is that long), also called ``tir_optimal_token_baseline``. A custom estimator is
    specified as ``module:attribute`` or ``file.py:attribute`` (docs/extending.md). It cannot use a critic, but can
    require any number of responses per prompt."""
    adv_estimator_kwargs: dict[str, Any]
    """Keyword arguments of a custom ``adv_estimator``."""
    norm_adv_by_std_in_grpo: bool
    """Divide the centred score by the group's standard deviation (``grpo``, ``grpo_passk``); false means Dr.GRPO."""
    gamma: Probability
    """Per-token discount of ``reinforce_plus_plus`` and ``gae``, in [0, 1]."""
    lam: Probability
    """Lambda of ``gae``, in [0, 1]: 0 relies only on the critic, 1 only on the rewards."""
    use_kl_in_reward: bool
    """Subtract a per-token KL penalty, relative to the reference policy, from the rewards."""
    kl_penalty: Annotated[str, custom_or(KL_TYPES)]
    """Estimator of the KL divergence if ``use_kl_in_reward=true``; see ``actor.kl_loss_type``. The suffix ``+`` has no
    effect, because rewards have no gradient."""
    kl_penalty_kwargs: dict[str, Any]
    """Keyword arguments of a custom ``kl_penalty``."""
    kl_ctrl: KLControlConfig
    filter_groups: FilterGroupsConfig
    rollout_correction: RolloutCorrectionConfig
    use_pf_ppo: bool
    """Resample a batch's responses with replacement, using weights that depend on their rewards, and train on the same
    number of responses (PF-PPO, arXiv 2409.06957). Requires ``gae``."""
    pf_ppo: PFPPOConfig

    def check(self) -> None:
        require_custom_kwargs("adv_estimator", self.adv_estimator, self.adv_estimator_kwargs)
        require_custom_kwargs("kl_penalty", self.kl_penalty, self.kl_penalty_kwargs)
        drawn = not self.use_pf_ppo or self.adv_estimator == "gae"
        self.require(drawn, "use_pf_ppo", "belongs to algorithm.adv_estimator=gae; set it to false")
