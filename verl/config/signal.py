"""The group ``algorithm``: how rewards become advantages.

The dataclasses are the schema, ``configs/`` holds the values. There are no defaults here, so that every value has one
home.
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
"""Estimators of a KL divergence; with the suffix ``+`` the gradient is that of ``k2``."""

TOKEN_BASELINES = ("optimal_token_baseline", "tir_optimal_token_baseline")
GROUP_ESTIMATORS = ("grpo", "rloo", "reinforce_plus_plus_baseline", "gpg", "opo", *TOKEN_BASELINES)
"""Estimators that compare the responses to one prompt; of a single one they keep the reward. A
custom estimator decides how many it needs."""
_OTHERS = ("remax", "gae", "gpg", "opo", "grpo_passk")
ADV_ESTIMATORS = ("grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", *_OTHERS, *TOKEN_BASELINES)

REJECTION_RULES = tuple(f"{part}_k{k}" for part in ("token", "seq_sum", "seq_mean") for k in (1, 2, 3))
REJECTION_RULES += ("seq_max_k2", "seq_max_k3")


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


class Rejection(NamedTuple):
    """One rule and the bounds of its ratio (k1) or of its divergence (k2, k3; no lower bound)."""

    rule: str
    lower: float | None
    upper: float


@dataclass(frozen=True)
class RolloutCorrectionConfig(Group):
    """Corrections for the mismatch between the probabilities of the rollout engine and of the trainer.

    Names are veRL's. Truncated importance sampling (``rollout_is``) weights tokens, rejection (``rollout_rs``) leaves
    out tokens or responses, or both. Rejected tokens enter no loss and no denominator of a loss, but count in the
    statistics of their group and in the logs."""

    rollout_is: Literal["token", "sequence"] | None
    """Truncated importance sampling: weight a token's loss by the ratio p_trainer / p_rollout of the token or of its
    whole response; null: no weights."""
    rollout_is_threshold: PositiveFloat
    """Largest weight of ``rollout_is``, above 0."""
    rollout_is_batch_normalize: bool
    """Divide the weights by their mean over the batch, of tokens or responses by ``rollout_is``."""
    rollout_rs: list[str] | None
    """Rules, all of which a token must pass; null: none. With r = p_rollout / p_trainer of a token, k1 = log r,
    k2 = (log r)^2 / 2, k3 = 1/r - 1 + log r, log r within [-20, 20]. ``token_k1``, ``token_k2``, ``token_k3`` mask
    single tokens; ``seq_sum_k1`` (the ratio of the whole response), ``seq_mean_k1`` (its geometric mean by token),
    ``seq_max_k2`` and so on whole responses."""
    rollout_rs_threshold: list[Any] | None
    """For each rule, or for all of them, the largest value that passes. For k1 rules the bounds of the ratio itself,
    ``"0.5_2.0"``, or its upper one, 2.0, whose inverse is the lower one; for the others an upper bound in nats."""
    rollout_token_veto_threshold: Annotated[float, within("[1e-8, 1)")] | None
    """Reject a response with a token whose ratio p_trainer / p_rollout is below this, in (0, 1) and at least 1e-8, such
    as 1e-4; null: none. In the log the rule is called ``seq_max_k1``."""

    def check(self) -> None:
        # Raises for values that are out of range.
        assert self.rejections is not None

    @property
    def rejections(self) -> list[Rejection]:
        """All rules with their bounds; empty for none."""
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
    """Return the entries as text; veRL writes several in one, with commas between them."""
    return [part.strip() for value in values or [] for part in str(value).split(",")]


def _rejection(field: str, rule: str, bound: str) -> Rejection:
    lower, _, upper = bound.rpartition("_")
    ratio = rule.endswith("k1")
    fix = f"{rule} takes " + ("two ratios such as 0.5_2.0, or the upper one" if ratio else "one number in nats")
    try:
        high = float(upper)
        low = float(lower) if lower else None
    except ValueError:
        low = high = -1.0
    require(0 < high < float("inf"), field, bound, fix)
    if not ratio:
        require(low is None, field, bound, fix)
        return Rejection(rule, None, high)
    low = 1 / high if low is None else low
    require(0 < low < high, field, bound, f"{fix}; the lower one must be above 0 and below the upper one")
    return Rejection(rule, low, high)


@dataclass(frozen=True)
class PFPPOConfig(Group):
    """Weights with which ``algorithm.use_pf_ppo`` draws responses."""

    reweight_method: Literal["pow", "max_min", "max_random"]
    """Weight of a response of reward r: ``pow``, abs(r) to the power of ``weight_pow``; ``max_min``, 1 for the largest
    and the smallest reward of the batch and hardly anything for others; ``max_random``, 0.4 for the largest, 0.1 for
    others."""
    weight_pow: NotNegativeFloat
    """Exponent of ``pow``, at least 0."""


@dataclass(frozen=True)
class AlgorithmConfig(Group):
    """How rewards become advantages."""

    adv_estimator: Annotated[str, custom_or(ADV_ESTIMATORS)]
    """Advantage estimator: ``grpo``, ``rloo``, ``reinforce_plus_plus``, ``reinforce_plus_plus_baseline``, ``remax``
    (the baseline is the greedy response, one more response per prompt), ``gae`` (PPO, with the critic of the group
    ``critic``), ``gpg`` (centred, and scaled by the share of scores that are not 0; arXiv 2504.02546), ``opo`` (centred
    at the mean weighted by length; arXiv 2505.23585), ``grpo_passk`` (the best response's lead over the second best;
    arXiv 2503.19595), ``optimal_token_baseline`` (a baseline of its own for each token, that of least variance) or
    ``tir_optimal_token_baseline`` (the same, and none where only one response continues). Or your own, as
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
    kl_penalty: Annotated[str, custom_or(KL_TYPES)]
    """Estimator of that divergence, as ``actor.kl_loss_type``, with ``use_kl_in_reward=true``; rewards have no
    gradient, so a ``+`` changes nothing."""
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
        require_custom_kwargs("adv_estimator", self.adv_estimator, self.adv_estimator_kwargs)
        require_custom_kwargs("kl_penalty", self.kl_penalty, self.kl_penalty_kwargs)
        drawn = not self.use_pf_ppo or self.adv_estimator == "gae"
        self.require(drawn, "use_pf_ppo", "belongs to algorithm.adv_estimator=gae; set it to false")
