"""Indexing of flat columns, in which the entries of all episodes are concatenated."""

from typing import Any

import torch
from torch import Tensor

from verl.utils.device import to_device


def spans(lengths: Tensor, rows: Tensor) -> Tensor:
    """Return the indices of all entries of the episodes ``rows [b]``, where ``lengths [B]`` are the episodes' sizes."""
    starts, sizes = (lengths.cumsum(dim=0) - lengths)[rows], lengths[rows]
    return starts.repeat_interleave(sizes) + positions_within(sizes)


def positions_within(lengths: Tensor) -> Tensor:
    """Return each entry's index within its episode, where ``lengths [B]`` are the episodes' sizes."""
    starts = lengths.cumsum(dim=0) - lengths
    return torch.arange(int(lengths.sum()), device=lengths.device) - starts.repeat_interleave(lengths)


def sums_within(values: Tensor, lengths: Tensor) -> Tensor:
    """Sum ``values [M]`` within each episode and return [B], where ``lengths [B]`` are the episodes' sizes."""
    rows = torch.arange(len(lengths)).repeat_interleave(lengths)
    return values.new_zeros(len(lengths)).index_add(0, rows, values)


def take(values: Any, index: Tensor | slice) -> Any:
    """Return a copy of a column's entries at ``index``."""
    if isinstance(index, slice):
        return values[index] if isinstance(values, list) else values[index].clone()
    return [values[i] for i in index.tolist()] if isinstance(values, list) else values[to_device(index, values.device)]


def concat(values: list[Any]) -> Any:
    """Concatenate columns that are all lists or all tensors."""
    if isinstance(values[0], list):
        return [value for part in values for value in part]
    joined: Any = torch.cat(values)
    return joined
