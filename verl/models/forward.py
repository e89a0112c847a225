"""Forward passes of a sharded model over micro-batches: log-probabilities, hidden states, or per-token values.

The results do not depend on sequence packing, chunking of the output head, or sequence parallelism.

Shapes: B episodes with N tokens in total, M of them in responses; T tokens in this worker's layout; V vocabulary size;
L layers; D hidden size.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

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
from verl.models.packing import (
    MIN_SHARED,
    NO_MASK,
    Layout,
    packed_layout,
    padded_layout,
    shared_prompt_layout,
    take_tokens,
)
from verl.models.sequence_parallel import sequence_group
from verl.utils.device import to_device

TOLERANCE = {"float32": 1e-3, "bfloat16": 0.2}
"""Tolerance for the mean absolute difference between two layouts in any sequence, keyed by ``param_dtype``."""


class ForwardPass:
    """Forward passes over micro-batches. All workers must run each forward pass together."""

    def __init__(self, model: PreTrainedModel, config: ModelConfig, device: str) -> None:
        """Wrap a sharded ``model`` that was loaded with ``config`` and runs on ``device`` (``cpu`` or ``cuda``)."""
        self.model = model
        self.config = config
        self.device = device
        self.group = sequence_group(config.ulysses_sequence_parallel_size)

    def _layout(self, batch: Batch, share_prompts: bool = False) -> Layout:
        if share_prompts and self.config.shares_prompts:
            layout, share_saved = shared_prompt_layout(batch)
            if share_saved >= MIN_SHARED:
                return layout
        return packed_layout(batch, self.group) if self.config.use_remove_padding else padded_layout(batch)

    def _inputs(self, layout: Layout) -> dict[str, Any]:
        """Return the model's keyword arguments for ``layout``."""
        inputs = layout.on(self.device)
        # Only packed attention can interpret the dummy mask.
        ours = self.model.config._attn_implementation == attention_name(self.config)
        if "attention_mask" not in inputs and ours and self.model._supports_attention_backend:
            inputs["attention_mask"] = torch.ones(NO_MASK, dtype=torch.bool, device=self.device)
        return inputs

    @torch.no_grad()
    def _check_equal(self, results: Callable[[Batch], Iterator[tuple[str, Tensor]]]) -> None:
        """Compare the results of several layouts on a small batch.

        Raises ``ConfigError`` if a layout's result differs from the first layout's result by more than ``TOLERANCE``.

        Args:
            results: function that yields a pair for each layout: the setting that disables the layout, and the result
                [M, ...]. The first result comes from the model's own forward pass.
        """
        vocabulary = self.model.config.get_text_config().vocab_size
        rows = (7919 * torch.arange(1, 25)).remainder(vocabulary).view(3, 8)
        # Give the first and last rows the same prompt, to test shared prompts.
        rows[2, :4] = rows[0, :4]
        prompts = [rows[0, :4].tolist(), rows[1, 3:4].tolist(), rows[2, :4].tolist()]
        batch = Batch.of(prompts, rows[:, 4:].tolist())
        (_, expected), *others = results(batch)
        if isinstance(self.model, FSDPModule):
            self.model.reshard()
        for fix, actual in others:
            # Compare per row: the first row is correct even if packed rows attend to each other.
            difference = (actual - expected).abs().view(len(batch), -1).mean(dim=1).max().item()
            if not difference <= TOLERANCE[self.config.param_dtype]:
                raise ConfigError(
                    f"model.path={self.config.path!r}: {self.model.config.model_type} gives other results than its own "
                    f"forward pass in transformers (mean difference in a row: {difference:.3g}); set {fix}"
                )


class Teacher(NamedTuple):
    """A teacher model and the token sequences to run it on."""

    forward: "LogprobForward"
    """Forward passes of the teacher, which may be the policy itself."""
    rows: Batch
    """Micro-batch of the policy's responses with the teacher's prompts. The ``tokens`` are on the CPU."""

    def last_states(self, mask: Tensor | None) -> Tensor:
        """Return the last hidden states [n, D] that predict the response tokens in ``mask [M]`` (all if None)."""
        predictors = self.rows.predictors
        return self.forward.last_states(self.rows, predictors if mask is None else predictors[mask])


class LogprobForward(ForwardPass):
    """Forward passes of a causal language model that compute log-probabilities and entropies."""

    def __init__(self, model: PreTrainedModel, config: ModelConfig, device: str) -> None:
        """Patch the output head. With a chunked head or sequence packing, check the results on a small batch.

        Raises ``ConfigError`` if the configured layout and the model's own forward pass give different results.
        """
        super().__init__(model, config, device)
        if config.logits_dtype == "float32":
            compute_logits_in_float32(model)
        if config.logits_chunk_size:
            chunk_output_head(model, config.logits_chunk_size)
        if config.logits_chunk_size or config.use_remove_padding:
            self._check_equal(self._results)

    def logprobs(
        self,
        batch: Batch,
        scoring: Scoring,
        mask: Tensor | None = None,
        layers: Sequence[int] = (),
        teacher: Teacher | None = None,
    ) -> Batch:
        """Compute the log-probability and the entropy at each response token.

        Args:
            batch: micro-batch with ``tokens`` on the CPU; prompts must not be empty.
            mask: [M] bool on the CPU, true at tokens to score (other tokens get 0), or None to score all tokens.
            layers: indices of the layers whose hidden states to return; see :func:`record_states`.
            teacher: teacher for ``scoring.teacher_loss``, or None if no such loss is computed.

        Returns:
            The same episodes on the device with ``logprobs``, ``entropy`` and the statistics (see
            :func:`verl.models.output_head.by_statistic`). If ``layers`` is given, also ``states``: for each response of
            n tokens, the hidden states [n, L, D] that predict them.
        """
        batch = batch.columns("tokens")
        layout = self._layout(batch, share_prompts=True)
        with record_states(self.model, layers) as recorded:
            logprobs, entropy, *further = self._score(layout, batch, mask, scoring, teacher)
        entropy = entropy if scoring.differentiable_entropy else entropy.detach()
        scored = (
            batch.columns().to(self.device).fill(logprobs=logprobs, entropy=entropy, **by_statistic(further, scoring))
        )
        if recorded:
            places = to_device(layout.find(batch.predictors)[0], self.device)
            local = torch.stack([layer.flatten(0, 1)[places] for layer in recorded], dim=1)
            states = layout.collect(local, batch.predictors)
            scored.fill(states=list(states.split(batch.response_lengths.tolist())))
        return scored

    @torch.no_grad()
    def last_states(self, batch: Batch, tokens: Tensor) -> Tensor:
        """Return the last hidden states [n, D] at ``tokens [n]``, which are indices into the N tokens of ``batch``.

        Like :meth:`logits`, this method requires a chunked output head.
        """
        layout = self._layout(batch, share_prompts=True)
        places = to_device(layout.find(tokens)[0], self.device)
        return layout.collect(self.model(**self._inputs(layout), use_cache=False, positions=places), tokens)

    @torch.no_grad()
    def logits(self, states: Tensor) -> Tensor:
        """Return the logits [n, V] computed from last hidden states [n, D]."""
        logits: Tensor = self.model(states=states)
        return logits

    @torch.no_grad()
    def logits_within(self, states: Tensor) -> Tensor:
        """Compute :meth:`logits` during a forward pass of this model, when FSDP has already gathered the head."""
        logits: Tensor = self.model.forward(states=states)
        return logits

    def _score(
        self,
        layout: Layout,
        batch: Batch,
        mask: Tensor | None,
        scoring: Scoring,
        teacher: Teacher | None = None,
    ) -> tuple[Tensor, ...]:
        """Return the outputs of :func:`logprobs_and_entropy` for the response tokens, each of shape [M]."""
        if not self.config.use_remove_padding and not self.config.logits_chunk_size:
            return self._score_rows(layout, batch, mask, scoring)
        tokens, targets = batch.predictors, batch.response_tokens
        if mask is not None:
            tokens, targets = tokens[mask], targets[mask]
        places, here = layout.find(tokens)
        targets, is_empty = targets[here], not len(places)
        if is_empty:
            # Every worker must run the head forward and backward, or all other workers would hang in a collective.
            places, targets = places.new_zeros(1), targets.new_zeros(1)
        inputs, targets = self._inputs(layout), to_device(targets, self.device)
        if self.config.logits_chunk_size:
            scored_tokens = ScoringTargets(to_device(places, self.device), targets, scoring)
            if teacher is not None:
                states = teacher.last_states(mask)
                states = states.new_zeros(1, states.shape[1]) if is_empty else states[here]
                logits_of = self.logits_within if teacher.forward is self else teacher.forward.logits
                scored_tokens = scored_tokens._replace(teacher=(states, logits_of))
            values = self.model(**inputs, use_cache=False, targets=scored_tokens)
        else:
            # Responses that share a prompt are all predicted from its last token.
            places, index = places.unique(return_inverse=True)
            places, index = to_device(places, self.device), to_device(index, self.device)
            logits = self.model(**inputs, use_cache=False, logits_to_keep=places).logits[0]
            values = logprobs_and_entropy(take_tokens(logits, index), targets, scoring)
        local = torch.stack(values, dim=1)
        scored = layout.collect(local[:0] if is_empty else local, tokens)
        if mask is not None:
            rows = to_device(mask.nonzero().flatten(), self.device)
            scored = scored.new_zeros(len(mask), scored.shape[1]).index_copy(0, rows, scored)
        return scored.unbind(1)

    def _score_rows(self, layout: Layout, batch: Batch, mask: Tensor | None, scoring: Scoring) -> tuple[Tensor, ...]:
        """Compute the result of :meth:`_score` with the model's own forward pass over padded sequences."""
        batch = batch.trimmed().to(self.device)
        logits = self.model(**self._inputs(layout), use_cache=False, logits_to_keep=batch.width + 1).logits[:, :-1]
        values = map(batch.flat, logprobs_and_entropy(logits, batch.padded("response_tokens"), scoring))
        mask = None if mask is None else to_device(mask, self.device)
        return tuple(value if mask is None else torch.where(mask, value, 0.0) for value in values)

    def _results(self, batch: Batch) -> Iterator[tuple[str, Tensor]]:
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
    """Forward passes of a token classification model that predicts one value per token."""

    def __init__(self, model: PreTrainedModel, config: ModelConfig, device: str) -> None:
        """Check the results on a small batch if sequence packing is on, as :class:`LogprobForward` does."""
        super().__init__(model, config, device)
        if config.use_remove_padding:
            self._check_equal(self._results)

    def values(self, batch: Batch) -> Tensor:
        """Return the predicted value of each token, [N] float32 on the device, for a batch on the CPU."""
        batch = batch.columns("tokens")
        # If the policy's vocabulary has more padding than this model's, it may sample ids that are out of range here.
        vocabulary = self.model.config.get_text_config().vocab_size
        layout = self._layout(batch.fill(tokens=batch.tokens.clamp(max=vocabulary - 1)))
        logits: Tensor = self.model(**self._inputs(layout), use_cache=False).logits
        return self._at_all_tokens(layout, logits.squeeze(-1).float())

    def _at_all_tokens(self, layout: Layout, values: Tensor) -> Tensor:
        """Convert the model's output, [B, S, ...] or [1, T, ...], to one entry per token, [N, ...]."""
        tokens = torch.arange(len(layout.places))
        return layout.collect(values.flatten(0, 1)[to_device(layout.find(tokens)[0], self.device)], tokens)

    def _results(self, batch: Batch) -> Iterator[tuple[str, Tensor]]:
        """Yield the last hidden states, scaled to mean magnitude 1. The outputs of a new value head would all be 0."""
        for layout in (padded_layout(batch), self._layout(batch)):
            inputs = self._inputs(layout)
            states = self.model(**inputs, use_cache=False, output_hidden_states=True).hidden_states[-1]
            states = self._at_all_tokens(layout, states.float())[to_device(batch.in_response, self.device)]
            yield "use_remove_padding=false in its options", states / states.abs().mean()


@contextmanager
def record_states(model: PreTrainedModel, layers: Sequence[int]) -> Iterator[list[Tensor]]:
    """Yield a list that receives the hidden states [B, S, D] of ``layers`` from a forward pass inside the block.

    Raises ``ValueError`` if a layer index is out of range or repeated.

    Args:
        layers: distinct indices into ``hidden_states[1:]`` of ``transformers``; negative indices count from the end.
            Each state is the output of a decoder layer; the last layer's state is taken after the final norm.
    """
    if not layers:
        yield []
        return
    decoder = getattr(model, model.base_model_prefix)
    # A vision-language model wraps a text model.
    decoder = getattr(decoder, "language_model", decoder)
    depth = decoder.config.get_text_config().num_hidden_layers
    indices = resolve_layers(layers, depth)
    last = depth - 1
    blocks = _blocks(decoder, depth) if any(layer != last for layer in indices) else []
    outputs: dict[int, Tensor] = {}
    states: list[Tensor] = []

    def keep(layer: int, _module: nn.Module, _inputs: Any, output: Any) -> None:
        outputs[layer] = (output if isinstance(output, Tensor) else output[0]).detach()

    with ExitStack() as stack:
        for layer in indices:
            module = decoder if layer == last else blocks[layer]
            stack.callback(module.register_forward_hook(partial(keep, layer)).remove)
        yield states
    states += [outputs[layer] for layer in indices]


def _blocks(decoder: nn.Module, depth: int) -> list[nn.Module]:
    """Return the decoder's layers."""
    for module in decoder.modules():
        if isinstance(module, nn.ModuleList) and len(module) == depth:
            return list(module)
    raise ValueError(
        f"calculator.layers: {type(decoder).__name__} has no list of its {depth} layers; set [-1], the state after "
        "the final norm, or measure in the engine with calculator.source=rollout and rollout.name=vllm"
    )
