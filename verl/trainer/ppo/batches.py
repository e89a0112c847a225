"""What a step knows of its responses and learns from them, and how that is cut into mini-batches.

Legend: B responses, R response columns.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor

from verl.config.actor import ActorConfig
from verl.protocol import PolicyScores, RankMetrics, RolloutBatch
from verl.trainer.ppo.core_algos import rollout_weights, token_variances


class ModelOutputs(NamedTuple):
    """What the models say of a step's responses before the update."""

    scores: PolicyScores | None
    """The policy's; None where ``actor.bypass_mode`` saves them. Of the first mini-batch they may be NaN until the
    policy has learned from it, see ``PPOConfig.scores_in_update``."""
    old_logprobs: Tensor
    """[B, R], what ratios are to: the log-probabilities in ``scores``, or the engine's with ``actor.bypass_mode``."""
    ref_logprobs: Tensor
    """[B, R], under the reference; ``old_logprobs`` if there is no reference."""
    values: Tensor | None
    """[B, R], the critic's; None without a critic."""
    rank_metrics: RankMetrics
    """Of the engine's hidden states or, with ``calculator.source=actor``, the policy's; and of the tokens."""

    def fill(self, scores: PolicyScores) -> None:
        """Put the ``scores`` of the first rows, found late, in their place, for later epochs and the log."""
        assert self.scores is not None and self.old_logprobs is self.scores.logprobs, "PPOConfig.scores_in_update"
        self.scores.logprobs[: len(scores)] = scores.logprobs
        self.scores.entropy[: len(scores)] = scores.entropy


class LearningSignal(NamedTuple):
    """What the updates learn from."""

    mask: Tensor
    """[B, R] int64, 1 on the tokens that enter the losses."""
    advantages: Tensor
    """[B, R] float32, rank shaping included."""
    returns: Tensor | None
    """[B, R] float32, the critic's targets; None without a critic."""
    unshaped: Tensor
    """[B, R], the advantages before rank shaping."""
    rewards: Tensor
    """[B] float64, what the advantages are estimated from: each response's rewards of tokens together."""
    phi: Tensor | None
    """[B] float64, the auxiliary signal; None where the reward manager gives none."""
    rows: Tensor | None = None
    """[B'] int64, the responses that the updates take, in place of each once (``algorithm.use_pf_ppo``)."""

    def taken(self, batch: Any) -> Any:
        """The rows of ``batch`` that the updates take."""
        return batch if self.rows is None else batch[self.rows]


def token_gradient_variances(rollout: RolloutBatch, scores: PolicyScores | None, actor: ActorConfig) -> Tensor | None:
    """[B, R], of each token, for the estimators that need it; with truncated importance sampling those of the weighted
    tokens."""
    if scores is None or scores.sum_pi_squared is None:
        return None
    variances = token_variances(scores.logprobs, scores.sum_pi_squared)
    if actor.tis_level == "none":
        return variances
    pair = (scores.logprobs, rollout.rollout_logprobs)
    weights, _ = rollout_weights(*pair, rollout.response_mask, actor.tis_level, actor.tis_cap)
    return variances * weights.square()


def mini_batches(batch: Any, num_rows: int) -> Iterator[tuple[Any, int, int]]:
    """The consecutive mini-batches of ``num_rows`` responses, with their tokens and responses that are learned from.

    A mini-batch without such tokens, of filler or rejected responses alone, is left out: an optimizer step on gradients
    of 0 would still move the parameters, by AdamW's moments and weight decay.
    """
    for mini in batch.split(num_rows):
        num_tokens = int(mini.response_mask.sum())
        if num_tokens:
            yield mini, num_tokens, int(mini.response_mask.any(dim=1).sum())
