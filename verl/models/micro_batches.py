"""Cutting a worker's share into micro-batches, by rows or by tokens.

Legend: B rows on this rank, S columns, of which the last R hold responses.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from verl.config.common import ModelConfig


@dataclass(frozen=True)
class MicroBatching:
    """How large micro-batches are. It changes memory and speed, never the sum of gradients."""

    rows: int
    """Rows of a micro-batch where ``max_tokens`` is None."""
    max_tokens: int | None
    """Most tokens of a micro-batch, padding included unless ``packed``; a longer row is a micro-batch by itself."""
    packed: bool
    """Rows are joined without padding."""

    @classmethod
    def of(cls, model: ModelConfig, rows: int, max_tokens: int | None) -> Self:
        """For a model whose sequences ``ulysses_sequence_parallel_size`` workers share, with so many tokens on each."""
        budget = None if max_tokens is None else max_tokens * model.ulysses_sequence_parallel_size
        return cls(rows, budget, model.use_remove_padding)

    def cut(self, batch: Any) -> list[Tensor]:
        """Row numbers [b] of each micro-batch; together they are every row of ``batch`` once.

        By tokens, rows are sorted by length, so that neighbours pad little, and all ranks, which must call this
        together and hold equally many rows, get equally many micro-batches: FSDP gathers parameters once in each.

        Args:
            batch: a tensorclass with ``attention_mask`` [B, S] and ``response_mask`` [B, R].
        """
        if self.max_tokens is None:
            return list(torch.arange(len(batch)).split(self.rows))
        num_response = batch.response_mask.shape[1]
        prompts = batch.attention_mask[:, :-num_response].sum(dim=1)
        responses = batch.attention_mask[:, -num_response:].sum(dim=1)
        parts = split_by_tokens(prompts.tolist(), responses.tolist(), self.max_tokens, self.packed)
        count = torch.tensor(len(parts))
        dist.all_reduce(count, dist.ReduceOp.MAX)
        return [torch.tensor(rows) for rows in split_to_count(parts, int(count))]


def split_by_tokens(prompts: list[int], responses: list[int], max_tokens: int, packed: bool) -> list[list[int]]:
    """Rows from long to short, cut where the next would not fit.

    A packed micro-batch takes the sum of its rows' tokens. A padded one takes, for every row, the longest prompt and
    the longest response: prompts are padded on the left and responses on the right.
    """
    parts: list[list[int]] = []
    for row in sorted(range(len(prompts)), key=lambda row: -(prompts[row] + responses[row])):
        if parts:
            rows = [*parts[-1], row]
            if packed:
                cost = sum(prompts[i] + responses[i] for i in rows)
            else:
                cost = len(rows) * (max(prompts[i] for i in rows) + max(responses[i] for i in rows))
            if cost <= max_tokens:
                parts[-1] = rows
                continue
        parts.append([row])
    return parts


def split_to_count(parts: list[list[int]], count: int) -> list[list[int]]:
    """Halve the part with the most rows until there are ``count``, at most one a row."""
    parts = list(parts)
    while len(parts) < count:
        largest = max(range(len(parts)), key=lambda i: len(parts[i]))
        rows = parts[largest]
        assert len(rows) > 1, f"{count} micro-batches of {sum(map(len, parts))} rows"
        parts[largest : largest + 1] = [rows[: len(rows) // 2], rows[len(rows) // 2 :]]
    return parts


def restore_order(parts: Sequence[Tensor], cuts: Sequence[Tensor]) -> Tensor:
    """Results of micro-batches, ``parts`` [b, ...], in the order of the rows they were cut from, [B, ...] on the CPU.

    They are fetched together: to fetch each would have the device wait before the next micro-batch.
    """
    order = torch.cat(list(cuts))
    joined = torch.cat(list(parts)).cpu()
    ordered = torch.empty_like(joined)
    ordered[order] = joined
    return ordered
