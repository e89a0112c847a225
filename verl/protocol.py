"""The typed batches that cross process boundaries.

Legend: B responses (or prompts), P prompt length, R response length, S = P + R, L captured layers, D hidden width.
Prompts are padded on the left to the same P and responses on the right to the same R, so that position P is the
first response token of every row.
"""

import torch
from tensordict import TensorClass, TensorDict
from torch import Tensor

from verl.batch import RankMetrics as RankMetrics


class PromptBatch(TensorClass):
    """Tokenised prompts."""

    input_ids: Tensor
    """[B, P] int64, padded on the left."""
    attention_mask: Tensor
    """[B, P] int64, 1 on real tokens."""
    uid: Tensor
    """[B] int64, what distinguishes the prompt's random draws from all others of the run."""


class RolloutBatch(TensorClass):
    """Sampled responses with what the engine knew when it sampled them."""

    input_ids: Tensor
    """[B, S] int64, prompt then response."""
    attention_mask: Tensor
    """[B, S] int64, 1 on real tokens."""
    response_mask: Tensor
    """[B, R] int64, 1 on response tokens, the end-of-sequence token included."""
    rollout_logprobs: Tensor
    """[B, R] float32, log-probability of each token under the distribution it was sampled from; 0 on padding."""
    group_ids: Tensor
    """[B] int64, the uid of the prompt; responses of one prompt share it."""
    truncated: Tensor
    """[B] bool, the response was cut at its maximal length."""
    rank_metrics: RankMetrics
    """What the engine measured; empty where it captures no hidden states."""

    @property
    def responses(self) -> Tensor:
        """[B, R] int64."""
        return self.input_ids[:, -self.response_mask.shape[1] :]


class PolicyScores(TensorClass):
    """What the policy says of responses that were sampled from it."""

    logprobs: Tensor
    """[B, R] float32, 0 on padding."""
    entropy: Tensor
    """[B, R] float32 in nats, 0 on padding."""
    rank_metrics: RankMetrics
    """From the same forward pass with ``calculator.source=actor``; empty without."""
    statistics: TensorDict | None = None
    """What an advantage estimator or a policy loss asks of the distributions: name -> [B, R] float32, 0 on padding,
    such as ``sum_pi_squared``, the sum of the squared probabilities of the vocabulary. None where nothing is asked."""

    @classmethod
    def unknown(cls, rollout: RolloutBatch) -> "PolicyScores":
        """NaN for every token of the responses."""
        size = [len(rollout)]
        logprobs, entropy = torch.full((2, *rollout.response_mask.shape), torch.nan)
        return cls(logprobs, entropy, RankMetrics.none(len(rollout)), batch_size=size)


class PolicyBatch(TensorClass):
    """What the policy update needs of a rollout."""

    input_ids: Tensor
    """[B, S] int64, prompt then response."""
    attention_mask: Tensor
    """[B, S] int64, 1 on real tokens."""
    response_mask: Tensor
    """[B, R] int64, 1 on the response tokens to learn from; a response may have none."""
    old_logprobs: Tensor
    """[B, R] float32, under the policy before the update; NaN where that update finds them."""
    rollout_logprobs: Tensor
    """[B, R] float32, under the distribution that the rollout engine sampled from; equal to ``old_logprobs`` without
    importance sampling."""
    ref_logprobs: Tensor
    """[B, R] float32, under the reference policy; equal to ``old_logprobs`` where no reference is used."""
    advantages: Tensor
    """[B, R] float32."""
    extra: TensorDict | None = None
    """What a policy loss of the user's own asks for, by name: [B] or [B, R], see
    :class:`verl.algorithms.losses.LossNeeds`. None for the built-in losses."""


class ValueBatch(TensorClass):
    """What the critic's update needs of a rollout."""

    input_ids: Tensor
    """[B, S] int64, prompt then response."""
    attention_mask: Tensor
    """[B, S] int64, 1 on real tokens."""
    response_mask: Tensor
    """[B, R] int64, 1 on the response tokens to learn from; a response may have none."""
    old_values: Tensor
    """[B, R] float32, the critic's values before the update, in units of reward."""
    returns: Tensor
    """[B, R] float32, what the values should be."""


class TextBatch(TensorClass):
    """Tokenised texts in a tokenizer of their own, for a reward model to read."""

    input_ids: Tensor
    """[B, S] int64, padded on the right."""
    attention_mask: Tensor
    """[B, S] int64, 1 on real tokens; at least one per row."""


class ConversationBatch(TensorClass):
    """Tokenised conversations for supervised learning."""

    input_ids: Tensor
    """[B, S] int64, padded on the right."""
    attention_mask: Tensor
    """[B, S] int64, 1 on real tokens."""
    loss_mask: Tensor
    """[B, S] int64, 1 on tokens to learn (the assistant's, its end-of-turn token included)."""
