"""Counting steps over epochs."""

from collections.abc import Iterable, Iterator
from typing import TypeVar

BatchT = TypeVar("BatchT")


def endless(loader: Iterable[BatchT]) -> Iterator[BatchT]:
    """The batches of ``loader``, pass after pass."""
    while True:
        yield from loader


def numbered_batches(loader: Iterable[BatchT], done: int, total_steps: int) -> Iterator[tuple[int, BatchT]]:
    """``(done + 1, batch), ...`` up to ``total_steps``, going through ``loader`` as often as that takes."""
    return zip(range(done + 1, total_steps + 1), endless(loader), strict=False)


def is_due(step: int, total_steps: int, frequency: int) -> bool:
    """Whether something that happens every ``frequency`` steps (0: never) and after the last happens after ``step``."""
    return step == total_steps or (frequency > 0 and step % frequency == 0)
