"""Starting and ending a run: device, Ray, exit codes."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import ray
import torch

from verl.config.load import ConfigError
from verl.single_controller import WorkerError

INTERRUPTED = 130
"""Exit code after Ctrl-C, as a shell gives it."""
TERMINATED = 143
"""Exit code after SIGTERM."""


def resolve_device(device: str) -> str:
    """``auto`` becomes ``cuda`` where torch sees a GPU and ``cpu`` elsewhere.

    Raises:
        ConfigError: ``cuda`` is asked for and torch sees no GPU.
    """
    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        raise ConfigError("device='cuda': torch sees no GPU; set device=auto or cpu")
    return ("cuda" if available else "cpu") if device == "auto" else device


@contextmanager
def ray_cluster(world_size: int, device_type: str) -> Iterator[None]:
    """A Ray cluster for the ``with`` block: the one that RAY_ADDRESS names, or one of this machine's own.

    The local cluster ends with the block and leaves no processes.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Workers have an environment of their own: processes that Ray starts beforehand would serve nobody.
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    options: dict[str, Any] = {}
    if not os.environ.get("RAY_ADDRESS"):
        # Workers are one process each; on a machine with fewer cores they share them, rather than wait for ever.
        cpus = max(os.cpu_count() or 1, world_size)
        # Only tokens and metrics cross processes, so the object store can be small.
        options = {"address": "local", "num_cpus": cpus, "object_store_memory": 256 << 20, "include_dashboard": False}
    on_terminate = signal.getsignal(signal.SIGTERM)
    ray.init(log_to_driver=False, logging_level="ERROR", **options)
    if threading.current_thread() is threading.main_thread():
        # Ray's own handler prints a stack trace and aborts the process.
        signal.signal(signal.SIGTERM, on_terminate)
    try:
        yield
    finally:
        ray.shutdown()


def exit_with(run: Callable[[], None]) -> None:
    """Call ``run`` and leave the process with a code and one clear message: 0 done, 1 failed, 130 Ctrl-C, 143 SIGTERM.

    Errors that are no user's or worker's keep their traceback.
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
        # While Ray waits, it replaces the code of what a signal handler raises.
        if terminated:
            sys.exit(TERMINATED)
        raise
