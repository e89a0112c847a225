"""Interface for custom policy losses, f(LossInputs, **policy_loss_kwargs) -> (losses, metrics).

Losses of shape [b, R] are aggregated with ``actor.loss_agg_mode``. Losses and metrics of shape [b] are averaged over
the responses of the mini-batch that have tokens in ``response_mask``. Scalar metrics are sums over tokens, logged as
means over the mini-batch's tokens. Every call must return the same metric names.

Shapes: b responses in a micro-batch, B in a mini-batch, R response columns.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

COLUMNS = {name: name for name in ("rollout_logprobs", "ref_logprobs", "rewards", "scores", "correct")}
COLUMNS |= {"group_ids": "group", "old_entropy": "entropy"}
"""Maps optional fields of :class:`LossInputs`, which a loss must request, to the batch columns that provide them."""

STATISTICS = ("entropy", "logsumexp", "mean_logprob", "sum_pi_squared", "top_k")
"""Differentiable per-token statistics over the vocabulary that a loss may request."""

OLD_STATISTICS = ("logsumexp", "mean_logprob", "sum_pi_squared")
"""Statistics of the pre-update policy that a loss may request."""

Function = TypeVar("Function", bound=Callable[..., Any])


class BatchSize(NamedTuple):
    """Counts for a whole optimiser step, summed over all micro-batches and ranks."""

    num_tokens: int
    """Number of response tokens."""
    num_sequences: int
    """Number of responses."""
    max_length: int
    """Maximum allowed response length in tokens."""

    def divisor(self, aggregation: str) -> int:
        """Return the divisor of the summed losses for ``actor.loss_agg_mode=aggregation``."""
        return {"token-mean": self.num_tokens, "token-sum": 1}.get(aggregation, self.num_sequences)


Prepare = Callable[..., Mapping[str, Tensor]]
"""f(LossInputs, **policy_loss_kwargs) -> additional columns by name, float or integer, [B] or [B, R].

The function receives a whole mini-batch on the CPU before the forward pass, so ``logprobs``, ``entropy`` and
``statistics`` are NaN or missing."""


@dataclass(frozen=True)
class LossNeeds:
    """Inputs that a policy loss requests. All other optional inputs are neither computed nor sent."""

    columns: tuple[str, ...] = ()
    """Requested names from ``COLUMNS``."""
    statistics: tuple[str, ...] = ()
    """Requested names from ``STATISTICS``."""
    top_k: int = 0
    """Number k of most likely tokens in the statistic ``top_k``."""
    old_statistics: tuple[str, ...] = ()
    """Requested names from ``OLD_STATISTICS``."""
    whole_groups: bool = False
    """Whether all responses to a prompt must be in the same micro-batch on one worker."""
    prepare: Prepare | None = None
    """Function called once on the whole mini-batch, to compute values such as quantiles over all of its tokens."""

    def __post_init__(self) -> None:
        choices = {"columns": tuple(COLUMNS), "statistics": STATISTICS, "old_statistics": OLD_STATISTICS}
        for name, allowed in choices.items():
            values = getattr(self, name)
            if isinstance(values, str) or not set(values) <= set(allowed):
                raise ValueError(f"{name}={values!r}: must be a tuple of {', '.join(allowed)}")
        if ("top_k" in self.statistics) != (self.top_k > 0):
            raise ValueError(f"top_k={self.top_k}: must be at least 1 with the statistic top_k, and 0 without")

    @property
    def old_policy(self) -> bool:
        """Whether a forward pass of the trainer's policy is required before the update."""
        return bool(self.old_statistics) or "old_entropy" in self.columns

    @property
    def before_update(self) -> bool:
        """Whether the old log-probabilities of all responses must be known when the update begins."""
        return self.old_policy or self.prepare is not None

    @property
    def fields(self) -> tuple[str, ...]:
        """Requested fields of :class:`LossInputs` from ``COLUMNS``."""
        return tuple(dict.fromkeys((*(["group_ids"] if self.whole_groups else []), *self.columns)))

    @property
    def batch_columns(self) -> tuple[str, ...]:
        """Batch columns required by the update, in addition to the columns that every loss needs."""
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
    """Declare the inputs that a custom policy loss needs (see :class:`LossNeeds`).

    Without this decorator, a loss receives only the fields of :class:`LossInputs` that have no default. Raises
    ``ValueError`` if a name is unknown or ``top_k`` is inconsistent with ``statistics``.
    """
    needs = LossNeeds(columns, statistics, top_k, old_statistics, whole_groups, prepare)

    def mark(function: Function) -> Function:
        function.needs = needs  # type: ignore[attr-defined]
        return function

    return mark


@dataclass(frozen=True)
class LossInputs:
    """A micro-batch for a custom policy loss, with all tensors on the policy's device.

    Per-token values are 0 outside ``sampled_mask``. Log-probabilities and entropies are in nats. Only ``logprobs``,
    ``statistics`` and, if requested, ``entropy`` carry a gradient. Never divide by b or R, because these depend on the
    micro-batch. Apply ``clamp(min=1)`` to token counts of ``response_mask`` before dividing by them, since a response
    may have no tokens in the mask.
    """

    logprobs: Tensor
    """Log-probabilities of the response tokens under the current policy, [b, R] float32."""
    old_logprobs: Tensor
    """Log-probabilities before the update, or from the engine with ``actor.bypass_mode``, [b, R] float32."""
    advantages: Tensor
    """Advantages, [b, R] float32."""
    response_mask: Tensor
    """Mask of the tokens that contribute to the loss, [b, R] bool."""
    sampled_mask: Tensor
    """Mask of all response tokens, including rejected ones, [b, R] bool."""
    tokens: Tensor
    """Response tokens, [b, R] int64."""
    entropy: Tensor
    """Entropy of the current policy, [b, R] float32."""
    size: BatchSize
    """Counts for the whole mini-batch."""
    statistics: Mapping[str, Tensor] = field(default_factory=dict)
    """Requested statistics of the softmax at the sampling temperature. [b, R] float32: ``logsumexp`` of the logits,
    ``mean_logprob`` (mean of all log-probabilities), ``sum_pi_squared`` (sum of all squared probabilities). [b, R, k]
    with the most likely token first: ``top_k_logprobs`` float32 and ``top_k_ids`` int64."""
    old_statistics: Mapping[str, Tensor] = field(default_factory=dict)
    """Requested statistics of the policy before the update, [b, R]."""
    prepared: Mapping[str, Tensor] = field(default_factory=dict)
    """Columns returned by ``prepare``, [b] or [b, R]."""
    rollout_logprobs: Tensor | None = None
    """Log-probabilities under the distribution that the rollout engine sampled from, [b, R] float32."""
    ref_logprobs: Tensor | None = None
    """Log-probabilities under the reference policy, [b, R] float32."""
    rewards: Tensor | None = None
    """Rewards passed to the advantage estimator, after reward shaping and KL penalty, [b] float32."""
    scores: Tensor | None = None
    """Scores from the verifiers, [b] float32."""
    correct: Tensor | None = None
    """Whether the verifiers judged each response correct, [b] bool."""
    group_ids: Tensor | None = None
    """Group ids, equal for responses to the same prompt, [b] int64."""
    old_entropy: Tensor | None = None
    """Entropy of the policy before the update, [b, R] float32."""

    @property
    def lengths(self) -> Tensor:
        """Number of sampled tokens in each response, [b] int64."""
        return self.sampled_mask.sum(dim=1)

    @property
    def groups(self) -> Tensor:
        """``group_ids`` renumbered as 0, 1, ..., [b] int64."""
        assert self.group_ids is not None, "request the column group_ids or whole_groups=True"
        groups: Tensor = self.group_ids.unique(return_inverse=True)[1]
        return groups
