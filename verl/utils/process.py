"""Configures a process: cores, garbage collection, allocator, umask. Small, because entry points import it first."""

import ctypes
import gc
import math
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

CGROUPS = Path("/sys/fs/cgroup")

UMASK = "VERL_UMASK"
"""Environment variable that passes the user's umask to processes started under a stricter umask."""

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's ``mallopt``."""
KEPT_BYTES = 256 << 20
"""Maximum number of free bytes to keep at the top of the heap."""
LARGEST_IN_HEAP = 32 << 20
"""Maximum size in bytes of heap allocations (glibc allows no more); larger allocations are mapped separately."""


def available_cores() -> int:
    """Return the number of cores, at least 1, that affinity and control groups make available to this process."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.ceil(min(cores, _quota())))


def _quota() -> float:
    """Return the CPU limit of this process's control groups in cores, or infinity without a limit."""
    groups = [line.partition("::")[2] for line in _words(Path("/proc/self/cgroup")) if line.startswith("0::")]
    # In a container, the process's group is often the root; elsewhere, the limits of its ancestors also apply.
    below = [CGROUPS / group.lstrip("/") for group in groups]
    folders = {CGROUPS, *(f for folder in below for f in (folder, *folder.parents) if f.is_relative_to(CGROUPS))}
    limits = [_words(folder / "cpu.max") for folder in folders]
    # Control groups, version 1.
    limits.append(_words(CGROUPS / "cpu/cpu.cfs_quota_us") + _words(CGROUPS / "cpu/cpu.cfs_period_us"))
    shares = [int(limit[0]) / int(limit[1]) for limit in limits if len(limit) == 2 and limit[0].isdigit()]
    return min(shares, default=math.inf)


def _words(file: Path) -> list[str]:
    try:
        return file.read_text().split()
    except OSError:
        return []


class Stage:
    """Current activity of a starting process, which the process waiting for it can display."""

    name = ""


def set_stage(name: str) -> None:
    """Set the current activity of this process; a worker's heartbeats report it to the driver."""
    Stage.name = name


@contextmanager
def loading() -> Iterator[None]:
    """Suspend garbage collection for imports and for objects that live as long as the process.

    The collector never scans objects that exist at the end of the block.

    Otherwise, it would repeatedly scan the growing modules, which takes a quarter of vLLM's import time, and later scan
    all of them in every full collection.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        freeze_objects()
        if was_on:
            gc.enable()


def freeze_objects() -> None:
    """Collect garbage once, and exclude all existing objects from later collections."""
    gc.collect()
    gc.freeze()


@contextmanager
def memory_limit(more: int) -> Iterator[None]:
    """Limit the growth of the process's address space to ``more`` bytes within the block.

    Allocations beyond the limit fail, in Python with ``MemoryError``. Systems that cannot limit address space (macOS)
    ignore the limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    wanted = [limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY]
    limit = min([psutil.Process().memory_info().vms + more, *wanted])
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        yield
    finally:
        if sys.platform == "linux":
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def keep_freed_memory() -> bool:
    """Make the C library reuse the memory of freed tensors of up to ``LARGEST_IN_HEAP`` bytes.

    Otherwise, the system clears pages before handing them out, which takes a third of a small model's forward pass and
    of a 135-million-parameter model's step. :func:`return_freed_memory` releases the memory kept. Returns whether the C
    library supports these settings, as glibc does.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return all(mallopt(*setting) for setting in ((M_TRIM_THRESHOLD, KEPT_BYTES), (M_MMAP_THRESHOLD, LARGEST_IN_HEAP)))


def return_freed_memory() -> None:
    """Return the memory of freed tensors to the system; call this before work that needs other tensor sizes."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def restore_umask() -> None:
    """Restore the user's file permissions in a process that started under a stricter umask."""
    if UMASK in os.environ:
        os.umask(int(os.environ[UMASK], 8))


@contextmanager
def private_files() -> Iterator[None]:
    """Make files created in the block private, also in child processes; workers call :func:`restore_umask`."""
    # Set the variable first, so that every process that starts under the stricter umask knows the user's umask.
    before = os.umask(0o077)
    os.umask(before)
    os.environ.setdefault(UMASK, f"{before:o}")
    os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)
