"""The group ``algorithm.rollout_correction``: which tokens the rollout engine and the trainer disagree on too much."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, get_args

from verl.config.checks import NAMES_ONCE, Group, require, require_choice, within

RejectionRule = Literal[
    "token_k1",
    "token_k2",
    "token_k3",
    "seq_sum_k1",
    "seq_sum_k2",
    "seq_sum_k3",
    "seq_mean_k1",
    "seq_mean_k2",
    "seq_mean_k3",
    "seq_max_k2",
    "seq_max_k3",
]


class Rejection(NamedTuple):
    """One rule and the bounds of its ratio (k1) or of its divergence (k2, k3; no lower bound)."""

    rule: str
    lower: float | None
    upper: float


@dataclass(frozen=True)
class RolloutCorrectionConfig(Group):
    """Rejection of tokens and responses whose probabilities in the rollout engine and in the trainer differ too much,
    under veRL's names. ``actor.tis_level`` weights them instead, and both can be used together. What is rejected enters
    no loss and no denominator of a loss: means are over the tokens and responses that are left. It still counts in the
    statistics of its group and in the logs."""

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
            require_choice(field, rule, get_args(RejectionRule))
        count = f"needs one threshold, or one for each of the {len(rules)} rules"
        self.require(len(bounds) in (1, len(rules)), f"{field}_threshold", count)
        bounds = bounds * len(rules) if len(bounds) == 1 else bounds
        return [_rejection(f"{field}_threshold", *pair) for pair in zip(rules, bounds, strict=True)]


def _entries(values: list[Any] | None) -> list[str]:
    """The entries as text; one of them may hold several with commas between them, as veRL writes them."""
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
