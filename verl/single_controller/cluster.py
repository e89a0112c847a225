"""The Ray cluster that a run's workers live on, and the device they compute on."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
import torch

from verl.config.errors import ConfigError


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
