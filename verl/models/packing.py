"""How a micro-batch lies in memory while a model reads it: padded rows, or rows joined to one sequence.

Legend: B rows, S columns, T tokens as the model of this worker reads them.
"""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from verl.models.sequence_parallel import gather_tokens


class Layout(ABC):
    """A micro-batch as the model reads it, and the way back to rows and columns."""

    inputs: dict[str, Any]
    """Keyword arguments of the model."""

    @abstractmethod
    def take(self, columns: Tensor) -> Tensor:
        """[T] in the order of the model's tokens, from what each of [B, S] columns has."""

    @abstractmethod
    def restore(self, tokens: Tensor) -> Tensor:
        """[B, S, ...] from what each of [T, ...] tokens of this worker got; 0 on padding that the model did not read.

        Differentiable. With several workers to a sequence they must call it together.
        """


class PaddedLayout(Layout):
    """Rows as they come, T = B S."""

    def __init__(self, input_ids: Tensor, attention_mask: Tensor) -> None:
        """``input_ids``, ``attention_mask``: [B, S]."""
        self.shape = input_ids.shape
        self.inputs = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": position_ids(attention_mask),
        }

    def take(self, columns: Tensor) -> Tensor:
        return columns.flatten()

    def restore(self, tokens: Tensor) -> Tensor:
        return tokens.view(*self.shape, *tokens.shape[1:])


class PackedLayout(Layout):
    """Rows joined to one sequence without padding.

    With ``group`` each of its workers reads a slice of that sequence, all of one length: the last one ends in a row of
    fillers where the tokens cannot be divided evenly.
    """

    def __init__(self, input_ids: Tensor, attention_mask: Tensor, group: ProcessGroup | None) -> None:
        """``input_ids``, ``attention_mask``: [B, S], the same on all workers of ``group``."""
        self.group = group
        self.shape = input_ids.shape
        self.at = attention_mask.flatten().nonzero().flatten()
        self.num_fillers = 0 if group is None else -len(self.at) % group.size()
        lengths = [length for length in attention_mask.sum(dim=1).tolist() if length]
        lengths += [self.num_fillers] if self.num_fillers else []
        ends = torch.tensor([0, *lengths]).cumsum(dim=0)
        positions = torch.cat([torch.arange(length) for length in lengths])
        cu_seq_lens = ends.to(torch.int32).to(input_ids.device)
        self.inputs = {
            "input_ids": self.take(input_ids)[None],
            "position_ids": self._slice(positions.to(input_ids.device))[None],
            "cu_seq_lens_q": cu_seq_lens,
            "cu_seq_lens_k": cu_seq_lens,
            "max_length_q": max(lengths),
            "max_length_k": max(lengths),
        }
        if group is not None:
            self.inputs["sequence_group"] = group

    def take(self, columns: Tensor) -> Tensor:
        tokens = columns.flatten()[self.at]
        return self._slice(torch.cat([tokens, tokens.new_zeros(self.num_fillers)]))

    def restore(self, tokens: Tensor) -> Tensor:
        if self.group is not None:
            tokens = gather_tokens(tokens, self.group)
        rows, columns = self.shape
        restored = tokens.new_zeros(rows * columns, *tokens.shape[1:])
        return restored.index_copy(0, self.at, tokens[: len(self.at)]).view(rows, columns, *tokens.shape[1:])

    def _slice(self, tokens: Tensor) -> Tensor:
        return tokens if self.group is None else tokens.tensor_split(self.group.size())[self.group.rank()]


def position_ids(attention_mask: Tensor) -> Tensor:
    """[B, S] positions that count real tokens alone, so that left padding does not shift a row."""
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
