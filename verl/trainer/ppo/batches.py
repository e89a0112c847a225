"""What a step knows of its responses and learns from them, and how that is cut into mini-batches.

Legend: B responses, R response columns.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from tensordict import TensorDict
from torch import Tensor

from verl.algorithms.losses import LossNeeds
from verl.protocol import PolicyBatch, PolicyScores, RankMetrics
from verl.trainer.ppo.sampled import Sampled
from verl.trainer.ppo.sampling import score_tensors


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


def policy_batch(
    sampled: Sampled,
    outputs: ModelOutputs,
    signal: LearningSignal,
    advantages: Tensor,
    weighted: bool,
    needs: LossNeeds,
) -> PolicyBatch:
    """What the policy update needs of a step's responses.

    Args:
        advantages: [B, R], in place of those in ``signal``.
        weighted: whether losses are weighted by importance, and the engine's log-probabilities needed for that.
        needs: what a policy loss of the user's own asks for.
    """
    rollout = sampled.rollout
    engine = weighted or "rollout_logprobs" in needs.columns
    return PolicyBatch(
        rollout.input_ids,
        rollout.attention_mask,
        signal.mask,
        outputs.old_logprobs,
        rollout.rollout_logprobs if engine else outputs.old_logprobs,
        outputs.ref_logprobs,
        advantages,
        _asked(sampled, outputs, signal, needs),
        batch_size=[len(rollout)],
    )


def _asked(sampled: Sampled, outputs: ModelOutputs, signal: LearningSignal, needs: LossNeeds) -> TensorDict | None:
    """The columns that a policy loss asks for besides those of every batch; None if there are none."""
    if not needs.sent:
        return None
    columns: dict[str, Tensor] = {}
    if {"scores", "correct"} & set(needs.sent):
        columns["scores"], columns["correct"], _ = score_tensors(sampled.pending)
    columns |= {"rewards": signal.rewards.float(), "group": sampled.rollout.group_ids}
    scores = outputs.scores
    columns |= {} if scores is None else {"entropy": scores.entropy}
    if needs.old_statistics:
        assert scores is not None and scores.statistics is not None, "LossNeeds.of_old_policy"
        columns |= {name: scores.statistics[name] for name in needs.old_statistics}
    asked = {name: columns[name] for name in needs.sent if name in columns}
    return TensorDict(asked, batch_size=[len(sampled.rollout)])


def mini_batches(batch: Any, num_rows: int) -> Iterator[tuple[Any, int, int]]:
    """The consecutive mini-batches of ``num_rows`` responses, with their tokens and responses that are learned from.

    A mini-batch without such tokens, of filler or rejected responses alone, is left out: an optimizer step on gradients
    of 0 would still move the parameters, by AdamW's moments and weight decay.
    """
    for mini in batch.split(num_rows):
        num_tokens = int(mini.response_mask.sum())
        if num_tokens:
            yield mini, num_tokens, int(mini.response_mask.any(dim=1).sum())
