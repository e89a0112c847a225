"""Seconds, tokens and peak memory by phase, for the step in progress; seconds also for the whole run."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from torch import Tensor

from verl.single_controller.profiling import MemoryPeak


class Work(NamedTuple):
    """The tokens that a phase processed, which determine a transformer's operations."""

    tokens: float
    """Number of tokens."""
    context: float
    """Sum over sequences of the squared number of tokens; attention grows with it."""

    @classmethod
    def of(cls, lengths: Tensor, known: Tensor | int = 0) -> "Work":
        """Sequences of ``lengths`` [B] tokens, the first ``known`` of which ([B], or a number) are cached."""
        return cls(float((lengths - known).sum()), float((lengths.double() ** 2 - known**2).sum()))


class StepRecord(NamedTuple):
    """One step, by phase."""

    seconds: dict[str, float]
    work: dict[str, Work]
    """Over all workers; phases that read or write no tokens are left out."""
    peaks: dict[str, MemoryPeak]
    """Of the worker that used most; phases without workers are left out."""


class PhaseTimer:
    """Adds up wall time, work and peak memory of named phases.

    Args:
        on_enter: called with the phase's name when it begins, such as a progress bar's.
        take_peak: returns the workers' peak memory since its last call, None if they were idle.
    """

    def __init__(
        self, on_enter: Callable[[str], None], take_peak: Callable[[], MemoryPeak | None] = lambda: None
    ) -> None:
        self._on_enter = on_enter
        self._take_peak = take_peak
        self._step = StepRecord({}, {}, {})
        self.totals: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time and the peak memory of the ``with`` block under ``name``."""
        self._on_enter(name)
        self._take_peak()  # drops the peak of work outside phases
        started = time.perf_counter()
        try:
            yield
        finally:
            elapsed = time.perf_counter() - started
            seconds, peaks = self._step.seconds, self._step.peaks
            seconds[name] = seconds.get(name, 0.0) + elapsed
            self.totals[name] = self.totals.get(name, 0.0) + elapsed
            if (peak := self._take_peak()) is not None:
                peaks[name] = peak.joined(peaks.get(name))

    def count(self, name: str, work: Work) -> None:
        """Add work to the phase ``name`` of this step."""
        before = self._step.work.get(name, Work(0.0, 0.0))
        self._step.work[name] = Work(before.tokens + work.tokens, before.context + work.context)

    def take_step(self) -> StepRecord:
        """What was counted since the last call."""
        step, self._step = self._step, StepRecord({}, {}, {})
        return step
