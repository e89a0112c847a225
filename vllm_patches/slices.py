"""Work in slices between the steps of an engine, so that it never blocks decoding.

A sliced function is a generator that pauses after every bounded piece of work and returns its result at the end.
"""

import functools
import inspect
import time
from collections.abc import Generator
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")
Slices = Generator[Any, None, T]
"""Yields None, or the CUDA event that its work so far ends with."""


def finish(slices: Slices[T]) -> T:
    """The result of sliced work, without pauses."""
    while True:
        try:
            next(slices)
        except StopIteration as end:
            result: T = end.value
            return result


def beside(work: Any, device: torch.device) -> Slices[Any]:
    """The result of ``work``, which may be sliced; on a GPU its slices run on a stream of their own.

    The caller's stream waits for the result, not for the slices.
    """
    if not inspect.isgenerator(work):
        return work
    if device.type != "cuda":
        return (yield from work)
    own, side = torch.cuda.current_stream(device), _side_stream(device)
    side.wait_stream(own)
    event = torch.cuda.Event()
    while True:
        try:
            with torch.cuda.stream(side):
                next(work)
                event.record(side)
        except StopIteration as end:
            own.wait_stream(side)
            return end.value
        yield event


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all jobs: torch's allocator keeps freed memory for the stream that it was allocated on, so each further
    stream would hold a workspace of its own."""
    return torch.cuda.Stream(device)


class Job(Generic[T]):
    """Sliced work that is done in turns."""

    def __init__(self, slices: Slices[T]) -> None:
        self._slices = slices
        self._event: Any = None
        self.done = False
        self.result: T | None = None

    def turn(self, seconds: float | None) -> bool:
        """Work for so long, at least one slice, or until it is done if ``seconds`` is None; whether it is done.

        On a GPU a turn is skipped while the device is still busy with the last one: what is launched is then bounded,
        and nothing waits for it.
        """
        start = time.perf_counter()
        if seconds is not None and self._event is not None and not self._event.query():
            return False
        while not self.done:
            try:
                self._event = next(self._slices)
            except StopIteration as end:
                self.result, self.done = end.value, True
            if seconds is not None and time.perf_counter() - start >= seconds:
                break
        return self.done

    def close(self) -> None:
        """Give it up."""
        self._slices.close()
