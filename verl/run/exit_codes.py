"""The exit code of a run, and its last message."""

import signal
import sys
from collections.abc import Callable
from types import FrameType

from verl.checkpoint.attempts import StaleAttempt
from verl.config.errors import ConfigError
from verl.run.preemption import Preempted
from verl.single_controller.failures import RequeueError, WorkerError
from verl.single_controller.scheduler import REQUEUE, SIGNALS

INTERRUPTED = 130
"""Exit code after Ctrl-C, as in a shell."""
TERMINATED = 143
"""Exit code after SIGTERM."""


def run_to_exit_code(run: Callable[[], None], requeue: bool = False) -> None:
    """Call ``run`` and exit with a code and one message: 0 done, 1 failed, 130 Ctrl-C, 143 SIGTERM, 75 to be requeued.

    Errors other than ``ConfigError``, ``StaleAttempt`` and ``WorkerError`` keep their traceback.

    Args:
        requeue: SIGTERM and SIGUSR1 mean that the run shall go on elsewhere, so that the code is 75.
    """
    code = REQUEUE if requeue else TERMINATED
    terminated = False

    def raise_terminated(signum: int, frame: FrameType | None) -> None:
        nonlocal terminated
        terminated = True
        raise SystemExit(code)

    for number in SIGNALS if requeue else (signal.SIGTERM,):
        signal.signal(number, raise_terminated)
    try:
        run()
    except (Preempted, RequeueError) as error:
        print(f"{error}; exit code {REQUEUE}: start it again", file=sys.stderr)
        sys.exit(REQUEUE)
    except (ConfigError, StaleAttempt, WorkerError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        print("interrupted; complete checkpoints are kept", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except SystemExit:
        # While Ray waits, it replaces the exit code that a signal handler raises.
        if terminated:
            sys.exit(code)
        raise
