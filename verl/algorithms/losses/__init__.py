"""Policy losses by name, the critic's loss, and the aggregation of per-token losses by name."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from verl.algorithms.losses.aggregate import constant_length, sequence_mean, sequence_sum, token_mean
from verl.algorithms.losses.cispo import cispo_loss
from verl.algorithms.losses.gmpo import gmpo_loss
from verl.algorithms.losses.gspo import gspo_loss
from verl.algorithms.losses.importance import mean_rollout_weight, rollout_weights
from verl.algorithms.losses.ppo_clip import ppo_clip_loss
from verl.algorithms.losses.value import value_loss

POLICY_LOSSES = {"ppo_clip": ppo_clip_loss, "gspo": gspo_loss, "cispo": cispo_loss, "gmpo": gmpo_loss}
"""Name -> f(logprobs, old_logprobs, advantages, response_mask, clip_low, clip_high) -> (losses [B, R], metrics).

All tensors are ``[B, R]``. ``ppo_clip`` also takes ``clip_ratio_c``.
"""


class StepSize(NamedTuple):
    """Counts of a whole optimiser step, summed over all micro-batches and ranks."""

    num_tokens: int
    """Response tokens."""
    num_sequences: int
    """Responses."""
    max_length: int
    """Longest response allowed, in tokens."""


LOSS_AGGREGATIONS: dict[str, Callable[[Tensor, Tensor, StepSize], Tensor]] = {
    "token-mean": lambda loss, mask, size: token_mean(loss, mask, size.num_tokens),
    "seq-mean-token-mean": lambda loss, mask, size: sequence_mean(loss, mask, size.num_sequences),
    "seq-mean-token-sum": lambda loss, mask, size: sequence_sum(loss, mask, size.num_sequences),
    "seq-mean-token-sum-norm": lambda loss, mask, size: constant_length(
        loss, mask, size.num_sequences, size.max_length
    ),
}
"""Name -> f(per_token_loss [B, R], response_mask [B, R], step size) -> the micro-batch's part of the step's loss."""

__all__ = [
    "LOSS_AGGREGATIONS",
    "POLICY_LOSSES",
    "StepSize",
    "cispo_loss",
    "constant_length",
    "gmpo_loss",
    "gspo_loss",
    "mean_rollout_weight",
    "ppo_clip_loss",
    "rollout_weights",
    "sequence_mean",
    "sequence_sum",
    "token_mean",
    "value_loss",
]
