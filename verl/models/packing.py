"""How a micro-batch is laid out for a model: padded rows, or rows packed into one sequence.

Legend: B episodes, N tokens of them all, T tokens as the model of this worker reads them.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from verl.batch import Batch, positions_within
from verl.config.common import ModelConfig
from verl.config.errors import ConfigError
from verl.models.info import ModelInfo
from verl.models.sequence_parallel import gather_tokens

PACKABLE_LAYERS = {"full_attention", "sliding_attention"}
"""Kinds of layers that can keep packed rows apart."""


class Layout:
    """A micro-batch as the model reads it, and where each of its tokens is."""

    def __init__(self, inputs: dict[str, Any], places: Tensor, group: ProcessGroup | None = None) -> None:
        """
        Args:
            inputs: keyword arguments of the model.
            places: [N] int64, the place of each token in the sequence that the workers of ``group`` read together; in
                padded rows, in these rows flattened.
            group: workers that each read a slice of the sequence, all of one length; None: this worker reads all.
        """
        self.inputs, self.places, self.group = inputs, places, group

    def find(self, tokens: Tensor) -> tuple[Tensor, Tensor | slice]:
        """Which of ``tokens [n]``, as indices of the N, this worker reads.

        Returns:
            Their places among its T tokens, and an index of them in ``tokens``.
        """
        places = self.places[tokens]
        if self.group is None:
            return places, slice(None)
        size = self.inputs["input_ids"].shape[1]
        here = (places // size == self.group.rank()).nonzero().flatten()
        return places[here] - size * self.group.rank(), here

    def collect(self, values: Tensor, tokens: Tensor) -> Tensor:
        """What the workers together have of ``tokens [n]``: [n, ...] from the values of those that each found.

        Differentiable. Workers that share a sequence must call it together.
        """
        if self.group is None:
            return values
        read = values.new_zeros(self.inputs["input_ids"].shape[1], *values.shape[1:])
        return gather_tokens(read.index_copy(0, self.find(tokens)[0], values), self.group)[self.places[tokens]]


def padded_layout(batch: Batch) -> Layout:
    """Rows of one length, T = B (P + R)."""
    input_ids, attention_mask = batch.trimmed().rows()
    inputs = {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "position_ids": position_ids(attention_mask),
    }
    return Layout(inputs, attention_mask.flatten().nonzero().flatten())


def packed_layout(batch: Batch, group: ProcessGroup | None = None) -> Layout:
    """Episodes one after another without padding.

    Where the tokens cannot be divided evenly among the workers of ``group``, the last slice ends in a row of fillers.
    """
    num_tokens, size = len(batch.tokens), 1 if group is None else group.size()
    fillers = -num_tokens % size
    lengths = torch.cat([batch.lengths, batch.lengths.new_tensor([fillers])])
    lengths = lengths[lengths > 0]
    positions = positions_within(lengths)
    bounds = torch.cat([lengths.new_zeros(1), lengths.cumsum(dim=0)]).to(torch.int32)
    longest = int(lengths.max())
    slices = (torch.cat([batch.tokens, batch.tokens.new_zeros(fillers)]), positions)
    input_ids, position = (whole.tensor_split(size)[0 if group is None else group.rank()] for whole in slices)
    inputs: dict[str, Any] = {
        "input_ids": input_ids[None],
        "position_ids": position[None],
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": longest,
        "max_length_k": longest,
    }
    if group is not None:
        inputs["sequence_group"] = group
    return Layout(inputs, torch.arange(num_tokens, device=batch.tokens.device), group)


def position_ids(attention_mask: Tensor) -> Tensor:
    """[B, S] positions that count real tokens only, so that left padding does not shift a row."""
    return (attention_mask.cumsum(dim=1) - 1).clamp(min=0)


def check_packing(config: ModelConfig, prefix: str) -> None:
    """Raise ``ConfigError`` naming an option under ``prefix`` if the model cannot read packed rows and should."""
    if not config.use_remove_padding:
        return
    info = ModelInfo.of(config)
    model = f"{info.text_config.model_type} at {config.path!r}"
    kinds = set(getattr(info.text_config, "layer_types", None) or PACKABLE_LAYERS)
    if not kinds <= PACKABLE_LAYERS:
        raise ConfigError(
            f"{prefix}.use_remove_padding=true: {model} has layers of kind {sorted(kinds - PACKABLE_LAYERS)}, which "
            "would mix packed rows; set it to false"
        )
    auto_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(info.text_config), None)
    if auto_class is not None and not auto_class._can_set_attn_implementation():
        raise ConfigError(
            f"{prefix}.use_remove_padding=true: {model} has its own attention function, which would mix packed rows; "
            "set it to false"
        )
    size, heads = config.ulysses_sequence_parallel_size, info.text_config.num_attention_heads
    if heads % size:
        raise ConfigError(
            f"{prefix}.ulysses_sequence_parallel_size={size}: must divide the {heads} attention heads of "
            f"{config.path!r}"
        )
