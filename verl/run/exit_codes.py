"""The exit code of a run, and its last message."""

import signal
import sys
from collections.abc import Callable
from types import FrameType

from verl.config.errors import ConfigError
from verl.single_controller import WorkerError

INTERRUPTED = 130
"""Exit code after Ctrl-C, as in a shell."""
TERMINATED = 143
"""Exit code after SIGTERM."""


def run_to_exit_code(run: Callable[[], None]) -> None:
    """Call ``run`` and exit with a code and one message: 0 done, 1 failed, 130 Ctrl-C, 143 SIGTERM.

    Errors other than ``ConfigError`` and ``WorkerError`` keep their traceback.
    """
    terminated = False

    def raise_terminated(signum: int, frame: FrameType | None) -> None:
        nonlocal terminated
        terminated = True
        raise SystemExit(TERMINATED)

    signal.signal(signal.SIGTERM, raise_terminated)
    try:
        run()
    except (ConfigError, WorkerError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        print("interrupted; complete checkpoints are kept", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except SystemExit:
        # While Ray waits, it replaces the exit code that a signal handler raises.
        if terminated:
            sys.exit(TERMINATED)
        raise
