"""Cutting a worker's share into micro-batches, by rows or by tokens.

Legend: B episodes on this rank.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor

from verl.batch import Batch
from verl.config.common import ModelConfig
from verl.models.packing import LEAST_SHARED, numbered, prompts_of

REPEATED = 1 / 16
"""Weight of a shared prompt's token for each further response to it: about the share of keys and values in what a
token keeps for the backward pass."""


@dataclass(frozen=True)
class MicroBatching:
    """How large micro-batches are. It changes memory and speed, never the sum of gradients."""

    rows: int
    """Rows of a micro-batch where ``max_tokens`` is None."""
    max_tokens: int | None
    """Most tokens of a micro-batch, padding included unless ``packed``; a longer row is a micro-batch by itself."""
    packed: bool
    """Rows are joined without padding."""
    shares_prompts: bool = False
    """The responses of a micro-batch to one prompt have it once (:func:`verl.models.packing.shared_prompt_layout`),
    which then counts once."""

    @classmethod
    def of(cls, model: ModelConfig, rows: int, max_tokens: int, by_tokens: bool, shares_prompts: bool = False) -> Self:
        """For a model whose sequences ``ulysses_sequence_parallel_size`` workers share, with so many tokens on each."""
        budget = max_tokens * model.ulysses_sequence_parallel_size if by_tokens else None
        return cls(rows, budget, model.use_remove_padding, shares_prompts)

    def cut(self, batch: Batch, units: Tensor | None = None) -> list[Tensor]:
        """Row numbers [b] of each micro-batch; together they are every row of ``batch`` once.

        By tokens, rows are sorted by length, so that neighbours pad little, or by prompt where they share it, the
        longest first; and all ranks, which must call this together and hold equally many rows, get equally many
        micro-batches: FSDP gathers parameters once in each.

        Args:
            units: [B] int64, equal on rows that must be in one micro-batch; a larger unit than fits is a micro-batch by
                itself. All ranks have equally many of them. None: every row by itself.
        """
        members = [[row] for row in range(len(batch))] if units is None else rows_by_value(units)
        if self.max_tokens is None:
            per_cut = max(1, self.rows // max(map(len, members)))
            cuts = [members[start : start + per_cut] for start in range(0, len(members), per_cut)]
            return [torch.tensor(_joined(cut)) for cut in cuts]
        rows = RowTokens.of(batch, self.packed, self.shares_prompts)
        parts = split_by_tokens(sorted(members, key=rows.order), self.max_tokens, rows.together)
        count = torch.tensor(len(parts))
        dist.all_reduce(count, dist.ReduceOp.MAX)
        return [torch.tensor(_joined(part)) for part in split_to_count(parts, int(count))]


def rows_by_value(values: Tensor) -> list[list[int]]:
    """Return the rows of each value of ``values [B]``, in the order in which the values appear."""
    members: dict[int, list[int]] = {}
    for row, value in enumerate(values.tolist()):
        members.setdefault(value, []).append(row)
    return list(members.values())


def _joined(units: list[list[int]]) -> list[int]:
    return [row for rows in units for row in rows]


@dataclass(frozen=True)
class RowTokens:
    """How many tokens rows take in a micro-batch."""

    prompts: list[int]
    """Tokens of each row's prompt."""
    responses: list[int]
    """Tokens of each row's response."""
    packed: bool
    prompt_of: list[int] | None = None
    """Rows of which this is the same share their prompt; None: each has its own."""

    @classmethod
    def of(cls, batch: Batch, packed: bool, shares_prompts: bool) -> Self:
        """Return the rows of ``batch``."""
        prompt_of = numbered(prompts_of(batch)).tolist() if shares_prompts else None
        return cls(batch.prompt_lengths.tolist(), batch.response_lengths.tolist(), packed, prompt_of)

    def order(self, unit: list[int]) -> tuple[int, int]:
        """By which units are sorted: long ones first, or long prompts, and the units of each together."""
        if self.prompt_of is None:
            return -self._whole(unit), 0
        return -self.prompts[unit[0]], self.prompt_of[unit[0]]

    def together(self, rows: list[int]) -> int:
        """Tokens of a micro-batch of these rows.

        A padded one takes, for every row, the longest prompt and the longest response: prompts are padded on the left
        and responses on the right. A shared prompt is read once, but its keys and values are there for each response,
        which :data:`REPEATED` counts.
        """
        if not self.packed:
            return len(rows) * (max(self.prompts[i] for i in rows) + max(self.responses[i] for i in rows))
        whole = self._whole(rows)
        if self.prompt_of is None:
            return whole
        prompts = {self.prompt_of[i]: self.prompts[i] for i in rows}
        shared = sum(prompts.values()) + sum(self.responses[i] for i in rows)
        repeated = whole - shared
        return shared + int(REPEATED * repeated) if repeated >= LEAST_SHARED * whole else whole

    def _whole(self, rows: list[int]) -> int:
        return sum(self.prompts[i] + self.responses[i] for i in rows)


def split_by_tokens(
    units: list[list[int]], max_tokens: int, together: Callable[[list[int]], int]
) -> list[list[list[int]]]:
    """Units of rows in their order, cut where the next would not fit: where rows take more tokens ``together``."""
    parts: list[list[list[int]]] = []
    for unit in units:
        if parts and together(_joined([*parts[-1], unit])) <= max_tokens:
            parts[-1].append(unit)
        else:
            parts.append([unit])
    return parts


def split_to_count(parts: list[list[list[int]]], count: int) -> list[list[list[int]]]:
    """Halve the part with the most units of rows until there are ``count``, at most one a unit."""
    parts = list(parts)
    while len(parts) < count:
        largest = max(range(len(parts)), key=lambda i: len(parts[i]))
        units = parts[largest]
        assert len(units) > 1, f"{count} micro-batches of {sum(map(len, parts))} units"
        parts[largest : largest + 1] = [units[: len(units) // 2], units[len(units) // 2 :]]
    return parts


def join_parts(parts: list[Batch], cuts: list[Tensor], width: int) -> Batch:
    """Results of micro-batches in the order of the rows they were cut from, on the CPU, with R = ``width``.

    They are fetched together: to fetch each would have the device wait before the next micro-batch.
    """
    return Batch.join(parts).to("cpu").widened(width)[torch.cat(cuts).argsort()]
