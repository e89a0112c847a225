"""Forward passes of a sharded model over micro-batches: log-probabilities of given tokens, or one number per token.

The same numbers whatever the way: padded or packed rows, the head at once or in pieces, one worker or several to a
sequence.

Legend: B rows, S columns, R response columns, T tokens as the model of this worker reads them, V vocabulary, L layers,
D hidden width.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from verl.config.common import ModelConfig
from verl.config.errors import ConfigError
from verl.models.hidden_states import record_states
from verl.models.output_head import (
    Scoring,
    ScoringTargets,
    by_statistic,
    chunk_output_head,
    compute_logits_in_float32,
    logprobs_and_entropy,
)
from verl.models.packing import Layout, PackedLayout, PaddedLayout
from verl.models.sequence_parallel import sequence_group
from verl.models.shared_prompts import LEAST_SHARED, SharedPromptLayout

TOLERANCE = {"float32": 1e-3, "bfloat16": 0.2}
"""Largest mean difference of a row between two ways to the same numbers, by precision of the products."""


class ForwardPass:
    """A model and the way that micro-batches go through it. All workers must call it together."""

    def __init__(self, model: PreTrainedModel, config: ModelConfig, device: str) -> None:
        """``model``: loaded with ``config`` and sharded; it computes on ``device``, ``cpu`` or ``cuda``."""
        self.model = model
        self.config = config
        self.device = device
        self.group = sequence_group(config.ulysses_sequence_parallel_size)

    def _layout(self, input_ids: Tensor, attention_mask: Tensor, num_response: int = 0) -> Layout:
        """``num_response``: columns of responses, at the end; 0: unknown, so that no prompt is shared."""
        if self.config.shares_prompts and num_response:
            shared = SharedPromptLayout(input_ids, attention_mask, num_response)
            if shared.share_saved >= LEAST_SHARED:
                return shared
        if self.config.use_remove_padding:
            return PackedLayout(input_ids, attention_mask, self.group)
        return PaddedLayout(input_ids, attention_mask)

    @torch.no_grad()
    def _check_equal(self, read: Callable[[Tensor, Tensor], list[list[Tensor]]], fixes: list[str]) -> None:
        """Compare several ways to read a few tokens.

        Args:
            read: from tokens and attention mask to the results of all ways, one [n, ...] per row; the first way is the
                model's own.
            fixes: for each other way the option that avoids it.

        Raises:
            ConfigError: a way gives other numbers than the first.
        """
        lengths = [[1] * 8, [0] * 3 + [1] * 5, [1] * 8]
        mask = torch.tensor(lengths, device=self.device)
        vocabulary = self.model.config.get_text_config().vocab_size
        tokens = (7919 * torch.arange(1, 25, device=self.device)).remainder(vocabulary).view(3, 8)
        # The last row continues the beginning of the first in another way.
        tokens[2, :4] = tokens[0, :4]
        first, *others = read(tokens, mask)
        if isinstance(self.model, FSDPModule):
            self.model.reshard()
        for other, fix in zip(others, fixes, strict=True):
            # Row by row: where packed rows mix, the first of them is still right.
            rows = [(a - b).abs().mean() for a, b in zip(other, first, strict=True)]
            difference = torch.stack(rows).max().item()
            if not difference <= TOLERANCE[self.config.param_dtype]:
                raise ConfigError(
                    f"model.path={self.config.path!r}: {self.model.config.model_type} gives other results than its own "
                    f"forward pass in transformers (mean difference in a row: {difference:.3g}); set {fix}"
                )


class ScoredTokens(NamedTuple):
    """What a language model says of tokens, 0 where they were not wanted."""

    logprobs: Tensor
    """[B, R] float32."""
    entropy: Tensor
    """[B, R] float32 in nats."""
    states: list[Tensor]
    """For each of the B rows [n, L, D], the hidden states that its n wanted tokens are drawn from; empty without
    ``layers``."""
    statistics: Mapping[str, Tensor] = {}
    """Those asked for, see :func:`verl.models.output_head.by_statistic`: [B, R], or [B, R, k]."""


class LogprobForward(ForwardPass):
    """Forward passes of a causal language model: log-probabilities of tokens and entropies."""

    def __init__(self, model: PreTrainedModel, config: ModelConfig, device: str) -> None:
        """As :class:`ForwardPass`.

        Raises:
            ConfigError: on a few tokens the configured way gives other numbers than the model's own forward pass.
        """
        super().__init__(model, config, device)
        if config.logits_dtype == "float32":
            compute_logits_in_float32(model)
        fixes = []
        if config.logits_chunk_size:
            chunk_output_head(model, config.logits_chunk_size)
            fixes.append("model.logits_chunk_size=0")
        if config.use_remove_padding:
            fixes.append("model.use_remove_padding=false")
        if config.shares_prompts:
            fixes.append("model.share_prompts=false")
        if fixes:
            self._check_equal(self._read_all_ways, fixes)

    def logprobs(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        wanted: Tensor,
        temperature: float,
        differentiable_entropy: bool = False,
        layers: Sequence[int] = (),
        statistics: Sequence[str] = (),
        top_k: int = 0,
    ) -> ScoredTokens:
        """Log-probability of tokens in the last R columns, and the entropy each was drawn with.

        Args:
            input_ids, attention_mask: [B, S].
            wanted: [B, R], R below S, 1 on the tokens to score; each has a token before it.
            temperature: softmax temperature of the policy.
            differentiable_entropy: whether the entropy carries a gradient, which takes more memory.
            layers: layers whose hidden states are returned too, see :func:`verl.models.hidden_states.record_states`.
            statistics: names in :data:`verl.models.output_head.STATISTICS` of what is returned too, with a gradient.
            top_k: how many tokens the statistic ``top_k`` names.
        """
        layout = self._layout(input_ids, attention_mask, wanted.shape[1])
        with record_states(self.model, layers) as recorded:
            scoring = Scoring(temperature, differentiable_entropy, tuple(statistics), top_k)
            logprobs, entropy, *further = self._score(layout, input_ids, wanted, scoring)
        states: list[Tensor] = []
        if recorded:
            every = layout.unpack(torch.stack([layer.flatten(0, 1) for layer in recorded], dim=1))
            before = every[:, -wanted.shape[1] - 1 : -1]
            states = [row[mask.bool()] for row, mask in zip(before, wanted, strict=True)]
        entropy = entropy if differentiable_entropy else entropy.detach()
        return ScoredTokens(logprobs, entropy, states, by_statistic(further, scoring))

    def _score(self, layout: Layout, input_ids: Tensor, wanted: Tensor, scoring: Scoring) -> tuple[Tensor, ...]:
        num_last = wanted.shape[1]
        if isinstance(layout, PaddedLayout) and not self.config.logits_chunk_size:
            return self._score_columns(layout, input_ids, wanted, scoring)
        # The prediction of the next token is in the column before it.
        columns = slice(-num_last - 1, -1)
        scored = torch.zeros_like(input_ids, dtype=torch.bool)
        scored[:, columns] = wanted.bool()
        positions, targets = layout.find(scored, input_ids.roll(-1, dims=1))
        nothing = not len(positions)
        if nothing:
            # Every worker must reach the head, forward and backward, or the others wait for its weights.
            positions, targets = positions.new_zeros(1), targets.new_zeros(1)
        if self.config.logits_chunk_size:
            values = self.model(**layout.inputs, use_cache=False, targets=ScoringTargets(positions, targets, scoring))
        else:
            logits = self.model(**layout.inputs, use_cache=False, logits_to_keep=positions).logits[0]
            values = logprobs_and_entropy(logits, targets, scoring)
        found = torch.stack(values, dim=1)
        return layout.place(found[:0] if nothing else found, scored)[:, columns].unbind(2)

    def _score_columns(self, layout: Layout, input_ids: Tensor, wanted: Tensor, scoring: Scoring) -> tuple[Tensor, ...]:
        """By the model's own forward pass over padded rows, as ``transformers`` has it."""
        num_last = wanted.shape[1]
        logits = self.model(**layout.inputs, use_cache=False, logits_to_keep=num_last + 1).logits[:, :-1]
        values = logprobs_and_entropy(logits, input_ids[:, -num_last:], scoring)
        return tuple(torch.where(wanted.bool(), value, 0.0) for value in values)

    def _read_all_ways(self, input_ids: Tensor, attention_mask: Tensor) -> list[list[Tensor]]:
        # The last tokens alone, so that there is a prompt before them.
        wanted = (attention_mask[:, 1:] * attention_mask[:, :-1]).bool()[:, -4:]
        padded = PaddedLayout(input_ids, attention_mask)
        found = [self._score_columns(padded, input_ids, wanted, Scoring(temperature=1.0))]
        if self.config.logits_chunk_size:
            found.append(self._score(padded, input_ids, wanted, Scoring(temperature=1.0)))
        if self.config.use_remove_padding:
            packed = PackedLayout(input_ids, attention_mask, self.group)
            found.append(self._score(packed, input_ids, wanted, Scoring(temperature=1.0)))
        if self.config.shares_prompts:
            shared = SharedPromptLayout(input_ids, attention_mask, wanted.shape[1])
            found.append(self._score(shared, input_ids, wanted, Scoring(temperature=1.0)))
        return [[row[mask] for row, mask in zip(logprobs, wanted, strict=True)] for logprobs, *_ in found]


class ValueForward(ForwardPass):
    """Forward passes of a token classification model with one label: a number per token."""

    def __init__(self, model: PreTrainedModel, config: ModelConfig, device: str) -> None:
        """As :class:`LogprobForward`."""
        super().__init__(model, config, device)
        if config.use_remove_padding:
            self._check_equal(self._states_both_ways, ["use_remove_padding=false in its options"])

    def values(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """The number that the model gives at each token, [B, S] float32; undefined on padding.

        Args:
            input_ids, attention_mask: [B, S].
        """
        # A policy with more rows of padding than this model may sample their numbers, which no tokenizer has.
        rows = self.model.config.get_text_config().vocab_size
        layout = self._layout(input_ids.clamp(max=rows - 1), attention_mask)
        logits: Tensor = self.model(**layout.inputs, use_cache=False).logits
        return layout.unpack(logits.flatten(0, 1).squeeze(-1).float())

    def _states_both_ways(self, input_ids: Tensor, attention_mask: Tensor) -> list[list[Tensor]]:
        """Last hidden states in units of their mean size, because a new head gives 0 for everything."""
        found = []
        for layout in (PaddedLayout(input_ids, attention_mask), self._layout(input_ids, attention_mask)):
            states = self.model(**layout.inputs, use_cache=False, output_hidden_states=True).hidden_states[-1]
            states, mask = layout.unpack(states.flatten(0, 1)).float(), attention_mask.bool()
            size = states[mask].abs().mean()
            found.append([row[read] / size for row, read in zip(states, mask, strict=True)])
        return found
