"""The typed batches that cross process boundaries.

Legend: B responses (or prompts), P prompt length, R response length, S = P + R, L captured layers, D hidden width.
Prompts are padded on the left to the same P and responses on the right to the same R, so that position P is the
first response token of every row.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from tensordict import TensorClass, TensorDict
from torch import Tensor


class PromptBatch(TensorClass):
    """Tokenised prompts."""

    input_ids: Tensor
    """[B, P] int64, padded on the left."""
    attention_mask: Tensor
    """[B, P] int64, 1 on real tokens."""
    uid: Tensor
    """[B] int64, what distinguishes the prompt's random draws from all others of the run."""


class RankMetrics(TensorClass):
    """Rank metrics of responses, as they travel from where the hidden states are to the log."""

    by_name: TensorDict
    """Metric name -> [B, L] float64, layers in the order they were captured."""
    mean_states: Tensor
    """[B, L, D] float32, mean hidden state of each response."""
    by_prefix: TensorDict | None = None
    """Metric name -> [B, L, T] float32, at each token the metric of the response up to it, NaN where it was not
    measured; None without ``calculator.keep_prefixes``."""

    @classmethod
    def none(cls, num_responses: int) -> "RankMetrics":
        """Those of responses whose hidden states nobody captured: L = 0 and no names."""
        size = [num_responses]
        return cls(TensorDict({}, batch_size=size), torch.zeros(num_responses, 0, 0), batch_size=size)

    @property
    def metric_names(self) -> list[str]:
        """The metrics, in the order the calculator gives them."""
        return [str(name) for name in self.by_name.keys()]

    @property
    def num_layers(self) -> int:
        """L."""
        return int(self.mean_states.shape[1])

    def by_layer(self) -> list[dict[str, Tensor]]:
        """Metric name -> [B], for each layer."""
        return [{name: self.by_name[name][:, i] for name in self.metric_names} for i in range(self.num_layers)]

    def to_rows(self) -> list[dict[str, Tensor]]:
        """One mapping of named tensors per response, the form in which a rollout engine hands out what it measured."""
        fields = {f"metric.{name}": self.by_name[name] for name in self.metric_names}
        if self.by_prefix is not None:
            fields |= {f"prefix.{name}": values for name, values in self.by_prefix.items()}
        fields["mean_states"] = self.mean_states
        return [{name: field[row] for name, field in fields.items()} for row in range(len(self.mean_states))]

    @classmethod
    def from_rows(cls, rows: Sequence[Mapping[str, Tensor]], num_columns: int) -> "RankMetrics":
        """The batch, on the CPU, of at least one mapping that :meth:`to_rows` gives, with T = ``num_columns``."""
        size = [len(rows)]
        by_prefix = {
            name.removeprefix("prefix."): torch.stack([_widened(row[name], num_columns) for row in rows]).cpu()
            for name in rows[0]
            if name.startswith("prefix.")
        }
        fields = {name: torch.stack([row[name] for row in rows]).cpu() for name in rows[0] if "prefix." not in name}
        mean_states = fields.pop("mean_states")
        by_name = {name.removeprefix("metric."): field for name, field in fields.items()}
        prefixes = TensorDict(by_prefix, batch_size=size) if by_prefix else None
        return cls(TensorDict(by_name, batch_size=size), mean_states, prefixes, batch_size=size)


def _widened(values: Tensor, num_columns: int) -> Tensor:
    """``values [L, T]`` with as many columns as given; NaN in those that are added."""
    return F.pad(values[:, :num_columns], (0, num_columns - values.shape[1]), value=torch.nan)


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
