"""Forward passes of a sharded model over micro-batches: log-probabilities, hidden states, or a number per token.

The same numbers whatever the way: padded or packed rows, the head at once or in pieces, one worker or several to a
sequence.

Legend: B episodes, N tokens of them all, M of them in responses, T tokens as the model of this worker reads them, V
vocabulary, L layers, D hidden width.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from verl.batch import Batch
from verl.config.common import ModelConfig
from verl.config.errors import ConfigError
from verl.models.attention import attention_name
from verl.models.info import resolve_layers
from verl.models.output_head import (
    Scoring,
    ScoringTargets,
    by_statistic,
    chunk_output_head,
    compute_logits_in_float32,
    logprobs_and_entropy,
)
from verl.models.packing import LEAST_SHARED, NO_MASK, Layout, packed_layout, padded_layout, shared_prompt_layout
from verl.models.sequence_parallel import sequence_group
from verl.utils.device import to_device

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

    def _layout(self, batch: Batch, share_prompts: bool = False) -> Layout:
        if share_prompts and self.config.shares_prompts:
            layout, share_saved = shared_prompt_layout(batch)
            if share_saved >= LEAST_SHARED:
                return layout
        return packed_layout(batch, self.group) if self.config.use_remove_padding else padded_layout(batch)

    def _inputs(self, layout: Layout) -> dict[str, Any]:
        """Keyword arguments of the model for a layout."""
        inputs = layout.on(self.device)
        # Only our own attention knows what it means, and of other layers some would take it for a mask.
        ours = self.model.config._attn_implementation == attention_name(self.config)
        if "attention_mask" not in inputs and ours and self.model._supports_attention_backend:
            inputs["attention_mask"] = torch.ones(NO_MASK, dtype=torch.bool, device=self.device)
        return inputs

    @torch.no_grad()
    def _check_equal(self, ways: Callable[[Batch], Iterator[tuple[str, Tensor]]]) -> None:
        """Compare several ways to read a few tokens.

        Args:
            ways: the option that avoids a way, and what it gives, [M, ...]; the first way is the model's own.

        Raises:
            ConfigError: a way gives other numbers than the first.
        """
        vocabulary = self.model.config.get_text_config().vocab_size
        rows = (7919 * torch.arange(1, 25)).remainder(vocabulary).view(3, 8)
        # The last row continues the beginning of the first in another way.
        rows[2, :4] = rows[0, :4]
        prompts = [rows[0, :4].tolist(), rows[1, 3:4].tolist(), rows[2, :4].tolist()]
        batch = Batch.of(prompts, rows[:, 4:].tolist())
        (_, first), *others = ways(batch)
        if isinstance(self.model, FSDPModule):
            self.model.reshard()
        for fix, other in others:
            # Row by row: where packed rows mix, the first of them is still right.
            difference = (other - first).abs().view(len(batch), -1).mean(dim=1).max().item()
            if not difference <= TOLERANCE[self.config.param_dtype]:
                raise ConfigError(
                    f"model.path={self.config.path!r}: {self.model.config.model_type} gives other results than its own "
                    f"forward pass in transformers (mean difference in a row: {difference:.3g}); set {fix}"
                )


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
        if config.logits_chunk_size:
            chunk_output_head(model, config.logits_chunk_size)
        if config.logits_chunk_size or config.use_remove_padding:
            self._check_equal(self._all_ways)

    def logprobs(
        self, batch: Batch, scoring: Scoring, wanted: Tensor | None = None, layers: Sequence[int] = ()
    ) -> Batch:
        """Log-probability of each response token, and the entropy it was drawn with.

        Args:
            batch: a micro-batch with ``tokens``, on the CPU; every prompt has a token.
            wanted: [M] bool on the CPU, the tokens to score, the others get 0; None: all.
            layers: layers whose hidden states are returned too, see :func:`record_states`.

        Returns:
            The same episodes on the device with ``logprobs``, ``entropy`` and columns of the statistics' names (see
            :func:`verl.models.output_head.by_statistic`); with ``layers`` also ``states``, for each response of n
            tokens the hidden states [n, L, D] that these are drawn from.
        """
        batch = batch.columns("tokens")
        layout = self._layout(batch, share_prompts=True)
        with record_states(self.model, layers) as recorded:
            logprobs, entropy, *further = self._score(layout, batch, wanted, scoring)
        entropy = entropy if scoring.differentiable_entropy else entropy.detach()
        scored = (
            batch.columns().to(self.device).fill(logprobs=logprobs, entropy=entropy, **by_statistic(further, scoring))
        )
        if recorded:
            places = to_device(layout.find(batch.predictors)[0], self.device)
            read = torch.stack([layer.flatten(0, 1)[places] for layer in recorded], dim=1)
            states = layout.collect(read, batch.predictors)
            scored.fill(states=list(states.split(batch.response_lengths.tolist())))
        return scored

    def _score(self, layout: Layout, batch: Batch, wanted: Tensor | None, scoring: Scoring) -> tuple[Tensor, ...]:
        """Columns [M] of what is computed from logits."""
        if not self.config.use_remove_padding and not self.config.logits_chunk_size:
            return self._score_rows(layout, batch, wanted, scoring)
        tokens, targets = batch.predictors, batch.response_tokens
        if wanted is not None:
            tokens, targets = tokens[wanted], targets[wanted]
        places, here = layout.find(tokens)
        targets, nothing = targets[here], not len(places)
        if nothing:
            # Every worker must reach the head, forward and backward, or the others wait for its weights.
            places, targets = places.new_zeros(1), targets.new_zeros(1)
        inputs, places, targets = self._inputs(layout), *(to_device(part, self.device) for part in (places, targets))
        if self.config.logits_chunk_size:
            values = self.model(**inputs, use_cache=False, targets=ScoringTargets(places, targets, scoring))
        else:
            logits = self.model(**inputs, use_cache=False, logits_to_keep=places).logits[0]
            values = logprobs_and_entropy(logits, targets, scoring)
        found = torch.stack(values, dim=1)
        scored = layout.collect(found[:0] if nothing else found, tokens)
        if wanted is not None:
            rows = to_device(wanted.nonzero().flatten(), self.device)
            scored = scored.new_zeros(len(wanted), scored.shape[1]).index_copy(0, rows, scored)
        return scored.unbind(1)

    def _score_rows(self, layout: Layout, batch: Batch, wanted: Tensor | None, scoring: Scoring) -> tuple[Tensor, ...]:
        """By the model's own forward pass over padded rows, as ``transformers`` has it."""
        batch = batch.trimmed().to(self.device)
        logits = self.model(**self._inputs(layout), use_cache=False, logits_to_keep=batch.width + 1).logits[:, :-1]
        values = map(batch.flat, logprobs_and_entropy(logits, batch.padded("response_tokens"), scoring))
        wanted = None if wanted is None else to_device(wanted, self.device)
        return tuple(value if wanted is None else torch.where(wanted, value, 0.0) for value in values)

    def _all_ways(self, batch: Batch) -> Iterator[tuple[str, Tensor]]:
        scoring, padded = Scoring(temperature=1.0), padded_layout(batch)
        yield "", self._score_rows(padded, batch, None, scoring)[0]
        if self.config.logits_chunk_size:
            yield "model.logits_chunk_size=0", self._score(padded, batch, None, scoring)[0]
        if self.config.use_remove_padding:
            packed = packed_layout(batch, self.group)
            yield "model.use_remove_padding=false", self._score(packed, batch, None, scoring)[0]
        if self.config.shares_prompts:
            shared, _ = shared_prompt_layout(batch)
            yield "model.share_prompts=false", self._score(shared, batch, None, scoring)[0]


class ValueForward(ForwardPass):
    """Forward passes of a token classification model with one label: a number per token."""

    def __init__(self, model: PreTrainedModel, config: ModelConfig, device: str) -> None:
        """As :class:`LogprobForward`."""
        super().__init__(model, config, device)
        if config.use_remove_padding:
            self._check_equal(self._states_both_ways)

    def values(self, batch: Batch) -> Tensor:
        """Return the model's number at each token of a batch on the CPU, [N] float32 on the device."""
        batch = batch.columns("tokens")
        # A policy with more rows of padding than this model may sample their numbers, which no tokenizer has.
        rows = self.model.config.get_text_config().vocab_size
        layout = self._layout(batch.fill(tokens=batch.tokens.clamp(max=rows - 1)))
        logits: Tensor = self.model(**self._inputs(layout), use_cache=False).logits
        return self._at_all_tokens(layout, logits.squeeze(-1).float())

    def _at_all_tokens(self, layout: Layout, values: Tensor) -> Tensor:
        """[N, ...] from what the model gave, [B, S, ...] or [1, T, ...]."""
        every = torch.arange(len(layout.places))
        return layout.collect(values.flatten(0, 1)[to_device(layout.find(every)[0], self.device)], every)

    def _states_both_ways(self, batch: Batch) -> Iterator[tuple[str, Tensor]]:
        """Last hidden states of responses in units of their mean size, because a new head gives 0 for everything."""
        for layout in (padded_layout(batch), self._layout(batch)):
            inputs = self._inputs(layout)
            states = self.model(**inputs, use_cache=False, output_hidden_states=True).hidden_states[-1]
            states = self._at_all_tokens(layout, states.float())[to_device(batch.in_response, self.device)]
            yield "use_remove_padding=false in its options", states / states.abs().mean()


@contextmanager
def record_states(model: PreTrainedModel, layers: Sequence[int]) -> Iterator[list[Tensor]]:
    """Within, a forward pass of a causal language model fills the list with states [B, S, D] of each of ``layers``.

    Args:
        layers: counted from either end, each once. The last is the state after the final norm, any other the output of
            that decoder layer: what ``transformers`` calls ``hidden_states[1:][layer]``.

    Raises:
        ValueError: the model has no such layer, or one is named twice.
    """
    if not layers:
        yield []
        return
    decoder = getattr(model, model.base_model_prefix)
    # A model that also sees images has a text model within.
    decoder = getattr(decoder, "language_model", decoder)
    depth = decoder.config.get_text_config().num_hidden_layers
    wanted = resolve_layers(layers, depth)
    last = depth - 1
    blocks = _blocks(decoder, depth) if any(layer != last for layer in wanted) else []
    found: dict[int, Tensor] = {}
    states: list[Tensor] = []

    def keep(layer: int, _module: nn.Module, _inputs: Any, output: Any) -> None:
        found[layer] = (output if isinstance(output, Tensor) else output[0]).detach()

    with ExitStack() as stack:
        for layer in wanted:
            module = decoder if layer == last else blocks[layer]
            stack.callback(module.register_forward_hook(partial(keep, layer)).remove)
        yield states
    states += [found[layer] for layer in wanted]


def _blocks(decoder: nn.Module, depth: int) -> list[nn.Module]:
    """Return the layers of a language model's body, without the head."""
    for module in decoder.modules():
        if isinstance(module, nn.ModuleList) and len(module) == depth:
            return list(module)
    raise ValueError(
        f"calculator.layers: {type(decoder).__name__} has no list of its {depth} layers; set [-1], the state after "
        "the final norm, or measure in the engine with calculator.source=rollout and rollout.name=vllm"
    )
