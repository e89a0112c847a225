"""Work in slices between the steps of an engine, so that it never blocks decoding.

A sliced function is a generator that pauses after every bounded piece of work and returns its result at the end.
"""

import functools
import inspect
import time
from collections.abc import Generator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
Slices = Generator[Any, None, T]
"""Yields None, what it has :class:`Launched` on a GPU, or an event that must have happened before it goes on."""

SMALL_BYTES = 64 << 10
"""Tensors up to this size travel to the host together."""


class Launched(NamedTuple):
    """A slice of work on a GPU, between two events."""

    start: Any
    end: Any
    awaited: bool
    """Whether the next slice reads on the host what this one computes."""

    def seconds(self) -> float:
        """The device's time, once ``end`` has happened."""
        return float(self.start.elapsed_time(self.end)) / 1000


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
    while True:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        result, done, paused = None, False, None
        with torch.cuda.stream(side):
            start.record(side)
            try:
                paused = next(work)
            except StopIteration as stop:
                done, result = True, stop.value
            end.record(side)
        # The caller's stream need not wait for the result of a job in turns: it has happened when the job goes on.
        yield Launched(start, end, awaited=done or paused is not None)
        if done:
            own.wait_stream(side)
            return result


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all jobs: torch's allocator keeps freed memory for the stream that it was allocated on, so each further
    stream would hold a workspace of its own."""
    return torch.cuda.Stream(device)


def to_host(tensors: Sequence[Tensor]) -> Slices[list[Tensor]]:
    """The tensors on the host. From a GPU the small ones are one copy, and the wait for it is a pause."""
    if not tensors or tensors[0].device.type == "cpu":
        return list(tensors)
    # 1. The small ones as bytes, one after another; the widest numbers first, so that all are aligned.
    small = [i for i, values in enumerate(tensors) if values.nbytes <= SMALL_BYTES]
    small.sort(key=lambda i: -tensors[i].itemsize)
    fetched = {i: v.to("cpu", non_blocking=True) for i, v in enumerate(tensors) if v.nbytes > SMALL_BYTES}
    packed = [tensors[i].reshape(-1).view(torch.uint8) for i in small]
    together = torch.cat(packed).to("cpu", non_blocking=True) if packed else torch.empty(0, dtype=torch.uint8)
    event = torch.cuda.Event()
    event.record()
    yield event
    event.synchronize()
    # 2. Each by itself, out of the page-locked memory that it arrived in.
    for i, part in zip(small, together.split([len(part) for part in packed]), strict=True):
        fetched[i] = part.view(tensors[i].dtype).view(tensors[i].shape)
    return [fetched[i].clone() for i in range(len(tensors))]


class Job(Generic[T]):
    """Sliced work that is done in turns."""

    def __init__(self, slices: Slices[T]) -> None:
        self._slices = slices
        self._flying: list[Any] = []
        self._slice_seconds = 0.0
        self.unpaid = 0.0
        """Seconds that a GPU took for what it has finished, and that nobody has accounted for."""
        self.done = False
        self.result: T | None = None

    def turn(self, seconds: float | None) -> bool:
        """Work for so long, at least one slice, or until it is done if ``seconds`` is None; whether it is done.

        On a GPU a turn is skipped while the device is still busy with the last one, and a turn launches as many slices
        as should take the device so long, by the longest so far: what is launched is bounded, and nothing waits for it.
        """
        start = time.perf_counter()
        if seconds is not None and not self._landed():
            return False
        while not self.done:
            try:
                paused = next(self._slices)
            except StopIteration as end:
                self.result, self.done = end.value, True
                break
            if seconds is None:
                continue
            awaited = paused is not None
            if paused is not None:
                self._flying.append(paused)
                awaited = getattr(paused, "awaited", True)
            expected = max(time.perf_counter() - start, len(self._flying) * self._slice_seconds)
            if expected >= seconds or (self._flying and not self._slice_seconds) or (awaited and not self._landed()):
                break
        return self.done

    def _landed(self) -> bool:
        """Whether the device has done all that was launched; its time is then known."""
        if self._flying and not _end_of(self._flying[-1]).query():
            return False
        for launched in self._flying:
            if isinstance(launched, Launched):
                self._slice_seconds = max(self._slice_seconds, launched.seconds())
                self.unpaid += launched.seconds()
        self._flying = []
        return True

    def close(self) -> None:
        """Give it up."""
        self._slices.close()


def _end_of(paused: Any) -> Any:
    return paused.end if isinstance(paused, Launched) else paused
