"""Splits a worker's batch into micro-batches by number of sequences or tokens.

Shapes: B episodes on this rank.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor

from verl.batch import Batch
from verl.config.common import ModelConfig
from verl.models.packing import MIN_SHARED, prompt_index

REPEAT_COST = 1 / 16
"""Relative cost of repeating a shared prompt token: roughly the fraction of activations that are keys or values."""


@dataclass(frozen=True)
class MicroBatching:
    """Size limits of micro-batches. The limits affect memory and speed but not gradients."""

    rows: int
    """Number of sequences per micro-batch, used if ``max_tokens`` is None."""
    max_tokens: int | None
    """Maximum number of tokens, including padding unless ``packed``. A longer sequence forms its own micro-batch."""
    packed: bool
    """Whether sequences are concatenated without padding."""
    shares_prompts: bool = False
    """Whether responses to the same prompt share its tokens (:func:`verl.models.packing.shared_prompt_layout`)."""

    @classmethod
    def of(cls, model: ModelConfig, rows: int, max_tokens: int, by_tokens: bool, shares_prompts: bool = False) -> Self:
        """Return the limits for ``model``. ``max_tokens`` is per worker of a sequence-parallel group."""
        budget = max_tokens * model.ulysses_sequence_parallel_size if by_tokens else None
        return cls(rows, budget, model.use_remove_padding, shares_prompts)

    def cut(self, batch: Batch, units: Tensor | None = None) -> list[Tensor]:
        """Partition ``batch`` and return the sequence indices [b] of each micro-batch.

        Splitting by tokens sorts sequences by length, or by prompt length if prompts are shared. All ranks must pass
        the same number of sequences and get the same number of micro-batches, because each one runs collectives.

        Args:
            units: [B] int64 unit ids, equal for sequences that must stay together, or None. A unit that exceeds the
                limit forms its own micro-batch. All ranks must have the same number of units.
        """
        members = [[row] for row in range(len(batch))] if units is None else rows_by_value(units)
        if self.max_tokens is None:
            per_cut = max(1, self.rows // max(map(len, members)))
            cuts = [members[start : start + per_cut] for start in range(0, len(members), per_cut)]
            return [torch.tensor(_flat(cut)) for cut in cuts]
        rows = RowTokens.of(batch, self.packed, self.shares_prompts)
        parts = split_by_tokens(sorted(members, key=rows.sort_key), self.max_tokens, rows.count)
        num_parts = torch.tensor(len(parts))
        dist.all_reduce(num_parts, dist.ReduceOp.MAX)
        return [torch.tensor(_flat(part)) for part in split_to_count(parts, int(num_parts))]


def rows_by_value(values: Tensor) -> list[list[int]]:
    """Group the indices of ``values [B]`` by value, in order of first appearance."""
    members: dict[int, list[int]] = {}
    for row, value in enumerate(values.tolist()):
        members.setdefault(value, []).append(row)
    return list(members.values())


def rows_by_teacher(batch: Batch) -> list[tuple[int, Tensor]]:
    """Return the index of each teacher in the column ``teacher`` and its rows [b], in order of first appearance."""
    parts = rows_by_value(batch.teacher)
    return [(int(batch.teacher[rows[0]]), torch.tensor(rows)) for rows in parts]


def _flat(units: list[list[int]]) -> list[int]:
    return [row for rows in units for row in rows]


@dataclass(frozen=True)
class RowTokens:
    """Token counts of the sequences in a batch, used to split the batch by tokens."""

    prompts: list[int]
    """Number of prompt tokens in each sequence."""
    responses: list[int]
    """Number of response tokens in each sequence."""
    packed: bool
    prompt_of: list[int] | None = None
    """Prompt id of each sequence, or None if prompts are not shared."""

    @classmethod
    def of(cls, batch: Batch, packed: bool, shares_prompts: bool) -> Self:
        """Compute the token counts of ``batch``."""
        prompt_of = prompt_index(batch).tolist() if shares_prompts else None
        return cls(batch.prompt_lengths.tolist(), batch.response_lengths.tolist(), packed, prompt_of)

    def sort_key(self, unit: list[int]) -> tuple[int, int]:
        """Return a key that sorts units in descending order of length, or of prompt length if prompts are shared."""
        if self.prompt_of is None:
            return -self._unshared(unit), 0
        return -self.prompts[unit[0]], self.prompt_of[unit[0]]

    def count(self, rows: list[int]) -> int:
        """Return the number of tokens in a micro-batch that consists of the sequences ``rows``.

        Without packing, prompts and responses are padded to the longest prompt and response. A shared prompt is
        computed once, but its keys and values are repeated for each response (:data:`REPEAT_COST`).
        """
        if not self.packed:
            return len(rows) * (max(self.prompts[i] for i in rows) + max(self.responses[i] for i in rows))
        unshared = self._unshared(rows)
        if self.prompt_of is None:
            return unshared
        prompts = {self.prompt_of[i]: self.prompts[i] for i in rows}
        shared = sum(prompts.values()) + sum(self.responses[i] for i in rows)
        saved = unshared - shared
        return shared + int(REPEAT_COST * saved) if saved >= MIN_SHARED * unshared else unshared

    def _unshared(self, rows: list[int]) -> int:
        return sum(self.prompts[i] + self.responses[i] for i in rows)


def split_by_tokens(
    units: list[list[int]], max_tokens: int, num_tokens: Callable[[list[int]], int]
) -> list[list[list[int]]]:
    """Split ``units`` in order into parts of at most ``max_tokens`` tokens, as counted by ``num_tokens(rows)``."""
    parts: list[list[list[int]]] = []
    for unit in units:
        if parts and num_tokens(_flat([*parts[-1], unit])) <= max_tokens:
            parts[-1].append(unit)
        else:
            parts.append([unit])
    return parts


def split_to_count(parts: list[list[list[int]]], count: int) -> list[list[list[int]]]:
    """Repeatedly halve the part with the most units until there are ``count`` parts."""
    parts = list(parts)
    while len(parts) < count:
        largest = max(range(len(parts)), key=lambda i: len(parts[i]))
        units = parts[largest]
        assert len(units) > 1, f"{count} micro-batches of {sum(map(len, parts))} units"
        parts[largest : largest + 1] = [units[: len(units) // 2], units[len(units) // 2 :]]
    return parts


def join_parts(parts: list[Batch], cuts: list[Tensor], width: int) -> Batch:
    """Concatenate the results of micro-batches on the CPU, in the original order, with responses of ``width`` columns.

    All results are copied in one transfer, because separate copies would each wait for the GPU.
    """
    return Batch.join(parts).to("cpu").widened(width)[torch.cat(cuts).argsort()]


def scored_by_teachers(
    batch: Batch, score: Callable[[int, Batch], Batch], run: Callable[..., Iterable[Batch]] = map
) -> Batch:
    """Return the results of ``score``, called with a teacher's index and its rows, in the order of ``batch``.

    Args:
        batch: Episodes. Without the column ``teacher``, teacher 0 scores all of them.
        run: Function like ``map`` that makes the calls.
    """
    if "teacher" not in batch:
        return score(0, batch)
    parts = rows_by_teacher(batch)
    scored = run(lambda part: score(part[0], batch[part[1]]), parts)
    return join_parts(list(scored), [rows for _, rows in parts], batch.width)
