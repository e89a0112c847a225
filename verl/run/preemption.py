"""Preemption: the scheduler wants its machines back, and the run ends between two steps with a checkpoint."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from verl.single_controller.scheduler import REPEATED_S, REQUEUE, SIGNALS


class Preempted(Exception):
    """The run was asked to end; the same command resumes it."""


class Preemption:
    """Remembers that the run was asked to end.

    Args:
        grace_s: seconds to finish a step in; 0: as many as it takes.
    """

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._name = ""
        self._since = 0.0
        self._stepping = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Within the block a first signal is remembered; a second one, later, ends the process at once."""
        before = {number: signal.signal(number, self._remember) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def finishing_steps(self) -> Iterator[None]:
        """Within the block :meth:`check` lets a step be finished; :meth:`after_step` ends the run."""
        self._stepping = True
        try:
            yield
        finally:
            self._stepping = False

    def check(self) -> None:
        """Raise ``Preempted`` if the run was asked to end and there is no step to finish, or no time for it."""
        if self._name and not self._stepping:
            raise Preempted(f"{self._name} before the first step")
        if self._name and self._grace_s and time.monotonic() - self._since > self._grace_s:
            raise Preempted(f"{self._name}: the step took longer than trainer.preemption_grace_s={self._grace_s:g}")

    def after_step(self, step: int, save: Callable[[], None]) -> None:
        """Raise ``Preempted`` if the run was asked to end, once ``save`` has written the checkpoint of ``step``."""
        if self._name:
            save()
            raise Preempted(f"{self._name}: step {step} is saved")

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if self._name and time.monotonic() - self._since > REPEATED_S:
            raise SystemExit(REQUEUE)
        if self._name:
            return
        self._name, self._since = signal.Signals(number).name, time.monotonic()
