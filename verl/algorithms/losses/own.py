"""Custom policy losses, f(LossInputs, **policy_loss_kwargs) -> (losses, metrics): their requests and their inputs.

Losses are [b, R], aggregated by ``actor.loss_agg_mode`` as those of the built-in ones, or one number a response, [b],
whose mean is taken over all responses of the mini-batch that have tokens to learn from. Metrics are scalars, sums over
tokens, which are logged as means over the tokens of the mini-batch; or [b], logged as means over the same responses.
Their names must be the same in every call.

Legend: b responses of a micro-batch, B of a mini-batch, R response columns.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

COLUMNS = {name: name for name in ("rollout_logprobs", "ref_logprobs", "rewards", "scores", "correct")}
COLUMNS |= {"group_ids": "group", "old_entropy": "entropy"}
"""Fields of :class:`LossInputs` that are there only if a loss asks for them -> the columns of the batch."""

STATISTICS = ("entropy", "logsumexp", "mean_logprob", "sum_pi_squared", "top_k")
"""Statistics over the vocabulary that a loss may request at each token, with a gradient."""

OLD_STATISTICS = ("logsumexp", "mean_logprob", "sum_pi_squared")
"""And of the policy before the update."""

Function = TypeVar("Function", bound=Callable[..., Any])


class StepSize(NamedTuple):
    """Counts of a whole optimiser step, summed over all micro-batches and ranks."""

    num_tokens: int
    """Response tokens."""
    num_sequences: int
    """Responses."""
    max_length: int
    """Longest response allowed, in tokens."""


Prepare = Callable[..., Mapping[str, Tensor]]
"""f(LossInputs, **policy_loss_kwargs) -> further columns by name, float or integer, [B] or [B, R].

The inputs are those of a whole mini-batch on the CPU; the policy has not read it yet, so ``logprobs``, ``entropy`` and
``statistics`` are NaN or missing."""


@dataclass(frozen=True)
class LossNeeds:
    """Needs of a policy loss; anything else is neither computed nor sent."""

    columns: tuple[str, ...] = ()
    """Names in ``COLUMNS``."""
    statistics: tuple[str, ...] = ()
    """Names in ``STATISTICS``."""
    top_k: int = 0
    """How many tokens the statistic ``top_k`` names at each position, at least 1 with it."""
    old_statistics: tuple[str, ...] = ()
    """Names in ``OLD_STATISTICS``."""
    whole_groups: bool = False
    """Whether all responses to a prompt must be in one micro-batch of one worker."""
    prepare: Prepare | None = None
    """Called once for each mini-batch, before it is cut: for what depends on all of its tokens, such as a quantile, and
    must not depend on the cut."""

    def __post_init__(self) -> None:
        choices = {"columns": tuple(COLUMNS), "statistics": STATISTICS, "old_statistics": OLD_STATISTICS}
        for name, allowed in choices.items():
            values = getattr(self, name)
            if isinstance(values, str) or not set(values) <= set(allowed):
                raise ValueError(f"{name}={values!r}: must be a tuple of {', '.join(allowed)}")
        if ("top_k" in self.statistics) != (self.top_k > 0):
            raise ValueError(f"top_k={self.top_k}: must be at least 1 with the statistic top_k, and 0 without")

    @property
    def of_old_policy(self) -> bool:
        """Whether the policy must score the responses before the update, whatever the log-probabilities are to."""
        return bool(self.old_statistics) or "old_entropy" in self.columns

    @property
    def before_update(self) -> bool:
        """Whether all log-probabilities before the update must be known when it begins."""
        return self.of_old_policy or self.prepare is not None

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields of :class:`LossInputs` in ``COLUMNS`` that are there."""
        return tuple(dict.fromkeys((*(["group_ids"] if self.whole_groups else []), *self.columns)))

    @property
    def sent(self) -> tuple[str, ...]:
        """Columns of the batch that the update needs besides those of every loss."""
        return (*(COLUMNS[name] for name in self.fields), *self.old_statistics)


def policy_loss(
    *,
    columns: tuple[str, ...] = (),
    statistics: tuple[str, ...] = (),
    top_k: int = 0,
    old_statistics: tuple[str, ...] = (),
    whole_groups: bool = False,
    prepare: Prepare | None = None,
) -> Callable[[Function], Function]:
    """Declare what a custom policy loss needs, see :class:`LossNeeds`; a decorator.

    A function without it gets the fields of :class:`LossInputs` that are always there.

    Raises:
        ValueError: a name is unknown, or ``top_k`` does not fit ``statistics``.
    """
    needs = LossNeeds(columns, statistics, top_k, old_statistics, whole_groups, prepare)

    def mark(function: Function) -> Function:
        function.needs = needs  # type: ignore[attr-defined]  # functions take attributes
        return function

    return mark


@dataclass(frozen=True)
class LossInputs:
    """A micro-batch as a user's policy loss sees it. All tensors are on the policy's device.

    Values of tokens are 0 outside ``sampled_mask``, log-probabilities and entropies are in nats, and only
    ``logprobs``, ``statistics`` and, if asked for, ``entropy`` carry a gradient. b and R are those of the micro-batch:
    divide by what masks count, with ``clamp(min=1)``, as a response may have no token to learn from; never by b or R.
    """

    logprobs: Tensor
    """[b, R] float32, log-probabilities of the response tokens under the policy as it learns."""
    old_logprobs: Tensor
    """[b, R] float32, under the policy before the update, or under the engine with ``actor.bypass_mode``."""
    advantages: Tensor
    """[b, R] float32."""
    response_mask: Tensor
    """[b, R] bool, the tokens to learn from; what is returned for others is not read."""
    sampled_mask: Tensor
    """[b, R] bool, all tokens of the responses, those that were rejected included."""
    tokens: Tensor
    """[b, R] int64, the response tokens."""
    entropy: Tensor
    """[b, R] float32, of the policy as it learns."""
    size: StepSize
    """Counts of the whole mini-batch."""
    statistics: Mapping[str, Tensor] = field(default_factory=dict)
    """The ``statistics`` that the decorator requests, softmax temperature included: ``logsumexp`` of all logits,
    ``mean_logprob``, the mean of all V log-probabilities, ``sum_pi_squared``, the sum of all squared probabilities, [b,
    R] float32; ``top_k_logprobs`` [b, R, k] float32 and ``top_k_ids`` [b, R, k] int64, likeliest first."""
    old_statistics: Mapping[str, Tensor] = field(default_factory=dict)
    """The same of the policy before the update, as ``old_statistics`` asks, [b, R]."""
    prepared: Mapping[str, Tensor] = field(default_factory=dict)
    """Columns that ``prepare`` returned, [b] or [b, R]."""
    rollout_logprobs: Tensor | None = None
    """[b, R] float32, under the distribution that the rollout engine sampled from."""
    ref_logprobs: Tensor | None = None
    """[b, R] float32, under the reference policy."""
    rewards: Tensor | None = None
    """[b] float32, what advantages are estimated from: reward shaping and KL penalty included."""
    scores: Tensor | None = None
    """[b] float32, the verifiers' scores as they are."""
    correct: Tensor | None = None
    """[b] bool, the verifiers' verdicts."""
    group_ids: Tensor | None = None
    """[b] int64, equal for responses to the same prompt."""
    old_entropy: Tensor | None = None
    """[b, R] float32, of the policy before the update."""

    @property
    def lengths(self) -> Tensor:
        """[b] int64, sampled tokens of each response."""
        return self.sampled_mask.sum(dim=1)

    @property
    def groups(self) -> Tensor:
        """[b] int64, ``group_ids`` as 0, 1, ..., to index by."""
        assert self.group_ids is not None, "ask for the column group_ids, or whole_groups=True"
        groups: Tensor = self.group_ids.unique(return_inverse=True)[1]
        return groups
