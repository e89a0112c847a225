"""Ends runs: saves preempted runs between steps, prints final messages and sets exit codes."""

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from types import FrameType

from verl.checkpoint.attempts import StaleAttempt
from verl.cluster.environment import REPEATED_S, REQUEUE, SIGNALS, signals_blocked
from verl.cluster.failures import RequeueError, WorkerError, driver_memory_line, is_out_of_memory
from verl.config.errors import ConfigError, error_lines
from verl.utils.files import storage_line

INTERRUPTED = 130
"""Exit code after Ctrl-C, as in shells."""
TERMINATED = 143
"""Exit code after SIGTERM."""


class Preempted(Exception):
    """Raised when a run has to end because it is preempted. The same command resumes the run."""


class Preemption:
    """Records whether a signal has asked the run to end.

    Args:
        grace_s: Seconds to finish a step, or 0 for no limit.
    """

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._name, self._since = "", 0.0
        self._stepping = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Record the first signal within the block. A second signal ends the process immediately."""
        before = {number: signal.signal(number, self._remember) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def finishing_steps(self) -> Iterator[None]:
        """Let the current step finish within the block. :meth:`after_step` then ends the run."""
        self._stepping = True
        try:
            yield
        finally:
            self._stepping = False

    def check(self) -> None:
        """Raise ``Preempted`` if the run has been asked to end, unless a step still has time to finish."""
        if self._name and not self._stepping:
            raise Preempted(f"{self._name} while the run was starting")
        if self._name and self._grace_s and time.monotonic() - self._since > self._grace_s:
            raise Preempted(f"{self._name}: the step took longer than trainer.preemption_grace_s={self._grace_s:g}")

    def after_step(self, step: int, save: Callable[[], None]) -> None:
        """If the run has been asked to end, save ``step`` by calling ``save``, and raise ``Preempted``."""
        if self._name:
            save()
            raise Preempted(f"{self._name}: step {step} is saved")

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if not self._name:
            self._name, self._since = signal.Signals(number).name, time.monotonic()
        elif time.monotonic() - self._since > REPEATED_S:
            raise SystemExit(REQUEUE)


def run_to_exit_code(run: Callable[[], None], requeue: bool = False) -> None:
    """Call ``run``, print a message on errors, and exit with a code that describes the outcome.

    The exit code is 0 on success, 1 after an error, 130 after Ctrl-C, 143 after SIGTERM, and 75 to request a requeue. A
    traceback is printed unless the error is a ``ConfigError``, ``StaleAttempt`` or ``WorkerError``, or is caused by
    failing storage or lack of memory.

    Args:
        requeue: Whether the run can continue elsewhere after SIGTERM and SIGUSR1, so that the exit code is 75.
    """
    code = REQUEUE if requeue else TERMINATED
    terminated = False

    def raise_terminated(signum: int, frame: FrameType | None) -> None:
        nonlocal terminated
        terminated = True
        raise SystemExit(code)

    # Slurm sends SIGUSR1 to every process of a job. Python's shared memory tracker inherits this mask. Otherwise, the
    # signal would end it, and the processes that use it would print tracebacks.
    with signals_blocked(signal.SIGUSR1):
        resource_tracker.ensure_running()
    for number in SIGNALS if requeue else (signal.SIGTERM,):
        signal.signal(number, raise_terminated)
    try:
        run()
    except (Preempted, RequeueError) as error:
        kind = "error: " if isinstance(error, RequeueError) else ""
        print(f"{kind}{error}; exit code {REQUEUE}: start it again", file=sys.stderr)
        sys.exit(REQUEUE)
    except ConfigError as error:
        sys.exit(error_lines(error))
    except (StaleAttempt, WorkerError) as error:
        sys.exit(f"error: {error}")
    except Exception as error:
        line = driver_memory_line(error, "start") if is_out_of_memory(error) else storage_line(error)
        if not line:
            raise
        sys.exit(f"error: {line}")
    except KeyboardInterrupt:
        print("interrupted; complete checkpoints are kept", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except SystemExit:
        # While waiting, Ray replaces the exit code raised by a signal handler.
        if terminated:
            sys.exit(code)
        raise
