"""The typed batches that cross process boundaries.

Legend: B responses (or prompts), P prompt length, R response length, S = P + R, L captured layers, D hidden width.
Prompts are padded on the left to the same P and responses on the right to the same R, so that position P is the
first response token of every row.
"""

from tensordict import TensorDict, tensorclass
from torch import Tensor


@tensorclass
class PromptBatch:
    """Tokenised prompts."""

    input_ids: Tensor
    """[B, P] int64, padded on the left."""
    attention_mask: Tensor
    """[B, P] int64, 1 on real tokens."""
    uid: Tensor
    """[B] int64, what distinguishes the prompt's random draws from all others of the run."""


@tensorclass
class RolloutBatch:
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
    rank_metrics: TensorDict
    """Metric name -> [B, L] float64; empty where no hidden states are captured."""
    mean_states: Tensor
    """[B, L, D] float32, mean hidden state of each response; L = 0 where none are captured."""

    @property
    def responses(self) -> Tensor:
        """[B, R] int64."""
        return self.input_ids[:, -self.response_mask.shape[1] :]


@tensorclass
class PolicyBatch:
    """What the policy update needs of a rollout."""

    input_ids: Tensor
    """[B, S] int64, prompt then response."""
    attention_mask: Tensor
    """[B, S] int64, 1 on real tokens."""
    response_mask: Tensor
    """[B, R] int64, 1 on the response tokens to learn from; a response may have none."""
    old_logprobs: Tensor
    """[B, R] float32, under the policy before the update."""
    rollout_logprobs: Tensor
    """[B, R] float32, under the distribution that the rollout engine sampled from."""
    ref_logprobs: Tensor
    """[B, R] float32, under the reference policy; equal to ``old_logprobs`` where no reference is used."""
    advantages: Tensor
    """[B, R] float32."""


@tensorclass
class ValueBatch:
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


@tensorclass
class TextBatch:
    """Tokenised texts in a tokenizer of their own, for a reward model to read."""

    input_ids: Tensor
    """[B, S] int64, padded on the right."""
    attention_mask: Tensor
    """[B, S] int64, 1 on real tokens; at least one per row."""


@tensorclass
class ConversationBatch:
    """Tokenised conversations for supervised learning."""

    input_ids: Tensor
    """[B, S] int64, padded on the right."""
    attention_mask: Tensor
    """[B, S] int64, 1 on real tokens."""
    loss_mask: Tensor
    """[B, S] int64, 1 on tokens to learn (the assistant's, its end-of-turn token included)."""


def layer_metrics(rank_metrics: TensorDict) -> dict[str, dict[str, Tensor]]:
    """Rank metrics by layer: ``{"1": {name: [B]}, ...}``, layers in the order they were captured."""
    names = list(rank_metrics.keys())
    layers = rank_metrics[names[0]].shape[1] if names else 0
    return {str(i + 1): {name: rank_metrics[name][:, i] for name in names} for i in range(layers)}
