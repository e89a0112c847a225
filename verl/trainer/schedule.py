"""Steps over epochs, and what is due after them."""

from collections.abc import Iterable, Iterator
from typing import TypeVar

BatchT = TypeVar("BatchT")


def endless(loader: Iterable[BatchT]) -> Iterator[BatchT]:
    """The batches of ``loader``, pass after pass."""
    while True:
        yield from loader


def numbered_batches(loader: Iterable[BatchT], done: int, total_steps: int) -> Iterator[tuple[int, BatchT]]:
    """``(done + 1, batch), ...`` up to ``total_steps``, repeating ``loader`` as often as needed."""
    return zip(range(done + 1, total_steps + 1), endless(loader), strict=False)


def is_due(step: int, last_step: int, frequency: int) -> bool:
    """Whether validating or saving is due after ``step``.

    ``frequency``: every so many steps and after the last; 0: only after the last; -1: never.
    """
    return frequency >= 0 and (step == last_step or (frequency > 0 and step % frequency == 0))
