"""How a micro-batch is laid out for a model: padded rows, or rows packed into one sequence.

Legend: B rows, S columns, T tokens as the model of this worker reads them.
"""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from verl.config.common import ModelConfig
from verl.config.errors import ConfigError
from verl.models.info import ModelInfo
from verl.models.sequence_parallel import gather_tokens

PACKABLE_LAYERS = {"full_attention", "sliding_attention"}
"""Kinds of layers that can keep packed rows apart."""


class Layout(ABC):
    """A micro-batch as the model reads it, and the way back to rows and columns."""

    inputs: dict[str, Any]
    """Keyword arguments of the model."""

    @abstractmethod
    def unpack(self, tokens: Tensor) -> Tensor:
        """From [T, ...] of this worker back to [B, S, ...]; 0 on padding that the model did not read.

        Differentiable. Workers that share a sequence must call it together.
        """

    @abstractmethod
    def find(self, columns: Tensor, following: Tensor) -> tuple[Tensor, Tensor]:
        """Which tokens of this worker stand in ``columns``, and what follows each.

        Args:
            columns: [B, S] bool.
            following: [B, S].

        Returns:
            Both [N]: places among the T tokens, and the values of ``following`` there.
        """

    @abstractmethod
    def place(self, values: Tensor, columns: Tensor) -> Tensor:
        """[B, S, ...] with ``values [N, ...]`` of the tokens that ``find`` gave for ``columns``, 0 elsewhere.

        Differentiable. Workers that share a sequence must call it together.
        """


class RowLayout(Layout):
    """A layout with one token for each column that the model reads."""

    @abstractmethod
    def pack(self, columns: Tensor) -> Tensor:
        """From [B, S] to [T], the values of the tokens that the model of this worker reads, in its order."""

    def find(self, columns: Tensor, following: Tensor) -> tuple[Tensor, Tensor]:
        places = self.pack(columns).nonzero().flatten()
        return places, self.pack(following)[places]

    def place(self, values: Tensor, columns: Tensor) -> Tensor:
        here = self.pack(columns)
        tokens = values.new_zeros(len(here), *values.shape[1:])
        return self.unpack(tokens.index_copy(0, here.nonzero().flatten(), values))


class PaddedLayout(RowLayout):
    """Rows as they come, T = B S."""

    def __init__(self, input_ids: Tensor, attention_mask: Tensor) -> None:
        """``input_ids``, ``attention_mask``: [B, S]."""
        self.shape = input_ids.shape
        self.inputs = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": position_ids(attention_mask),
        }

    def pack(self, columns: Tensor) -> Tensor:
        return columns.flatten()

    def unpack(self, tokens: Tensor) -> Tensor:
        return tokens.view(*self.shape, *tokens.shape[1:])


class PackedLayout(RowLayout):
    """Rows packed into one sequence without padding.

    With ``group`` each of its workers reads a slice of that sequence, all of one length: where the tokens cannot be
    divided evenly, the last slice ends in a row of fillers.
    """

    def __init__(self, input_ids: Tensor, attention_mask: Tensor, group: ProcessGroup | None) -> None:
        """``input_ids``, ``attention_mask``: [B, S], the same on all workers of ``group``."""
        self.group = group
        self.shape = input_ids.shape
        self.indices = attention_mask.flatten().nonzero().flatten()
        self.num_fillers = 0 if group is None else -len(self.indices) % group.size()
        lengths = [length for length in attention_mask.sum(dim=1).tolist() if length]
        lengths += [self.num_fillers] if self.num_fillers else []
        ends = torch.tensor([0, *lengths]).cumsum(dim=0)
        positions = torch.cat([torch.arange(length) for length in lengths])
        cu_seq_lens = ends.to(torch.int32).to(input_ids.device)
        self.inputs = {
            "input_ids": self.pack(input_ids)[None],
            "position_ids": self._slice(positions.to(input_ids.device))[None],
            "cu_seq_lens_q": cu_seq_lens,
            "cu_seq_lens_k": cu_seq_lens,
            "max_length_q": max(lengths),
            "max_length_k": max(lengths),
        }
        if group is not None:
            self.inputs["sequence_group"] = group

    def pack(self, columns: Tensor) -> Tensor:
        tokens = columns.flatten()[self.indices]
        return self._slice(torch.cat([tokens, tokens.new_zeros(self.num_fillers)]))

    def unpack(self, tokens: Tensor) -> Tensor:
        if self.group is not None:
            tokens = gather_tokens(tokens, self.group)
        rows, columns = self.shape
        padded = tokens.new_zeros(rows * columns, *tokens.shape[1:])
        return padded.index_copy(0, self.indices, tokens[: len(self.indices)]).view(rows, columns, *tokens.shape[1:])

    def _slice(self, tokens: Tensor) -> Tensor:
        return tokens if self.group is None else tokens.tensor_split(self.group.size())[self.group.rank()]


def position_ids(attention_mask: Tensor) -> Tensor:
    """[B, S] positions that count real tokens only, so that left padding does not shift a row."""
    return (attention_mask.cumsum(dim=1) - 1).clamp(min=0)


def trim_columns(input_ids: Tensor, attention_mask: Tensor, response_mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cut the columns that are padding in every row, left of the prompts and right of the responses.

    Args:
        input_ids, attention_mask: [B, S].
        response_mask: [B, R], the last R columns of the S.
    """
    used = attention_mask.any(dim=0).nonzero()
    first, last = int(used[0]), int(used[-1]) + 1
    cut = attention_mask.shape[1] - last
    num_response = response_mask.shape[1]
    return input_ids[:, first:last], attention_mask[:, first:last], response_mask[:, : num_response - cut]


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
