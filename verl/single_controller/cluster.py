"""The Ray cluster of a run's workers, and the device they compute on."""

import logging
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
    """``cuda`` or ``cpu``; ``auto`` is ``cuda`` where torch sees a GPU.

    Raises:
        ConfigError: ``device`` is ``cuda`` and torch sees no GPU.
    """
    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        raise ConfigError("device='cuda': torch sees no GPU; set device=auto or cpu")
    return ("cuda" if available else "cpu") if device == "auto" else device


@contextmanager
def ray_cluster(world_size: int, device_type: str) -> Iterator[None]:
    """A Ray cluster for the ``with`` block: the one at RAY_ADDRESS, or a local one.

    A local cluster ends with the block and leaves no processes.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Workers have their own environment, so processes that Ray starts in advance would never be used.
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    options: dict[str, Any] = {}
    if not os.environ.get("RAY_ADDRESS"):
        # One process per worker: on a machine with fewer cores they share them instead of waiting forever.
        cpus = max(os.cpu_count() or 1, world_size)
        # Only tokens and metrics cross processes, so the object store can be small.
        options = {"address": "local", "num_cpus": cpus, "object_store_memory": 256 << 20, "include_dashboard": False}
    on_terminate = signal.getsignal(signal.SIGTERM)
    ray.init(log_to_driver=False, logging_level=logging.ERROR, **options)
    if threading.current_thread() is threading.main_thread():
        # Ray's own handler prints a stack trace and aborts the process.
        signal.signal(signal.SIGTERM, on_terminate)
    try:
        yield
    finally:
        ray.shutdown()
