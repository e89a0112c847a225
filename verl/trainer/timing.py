"""Seconds by phase, for the step in progress and for the whole run."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class PhaseTimer:
    """Adds up the wall time of named phases.

    Args:
        on_enter: called with the phase's name when it begins, such as a progress bar's.
    """

    def __init__(self, on_enter: Callable[[str], None]) -> None:
        self._on_enter = on_enter
        self._step: dict[str, float] = {}
        self.totals: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time of the ``with`` block under ``name``."""
        self._on_enter(name)
        started = time.perf_counter()
        try:
            yield
        finally:
            elapsed = time.perf_counter() - started
            self._step[name] = self._step.get(name, 0.0) + elapsed
            self.totals[name] = self.totals.get(name, 0.0) + elapsed

    def take_step(self) -> dict[str, float]:
        """Seconds by phase since the last call, as ``timing_s/<phase>``, with their sum as ``timing_s/step``."""
        step, self._step = self._step, {}
        return {f"timing_s/{name}": seconds for name, seconds in step.items()} | {"timing_s/step": sum(step.values())}
