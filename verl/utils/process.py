"""Configures a process: cores, garbage collection, allocator, umask. Entry points import this small module first."""

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
"""Environment variable with the user's umask, for processes that are started under a stricter umask."""

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's ``mallopt``."""
KEPT_BYTES = 256 << 20
"""Maximum number of free bytes that stay at the top of the heap."""
LARGEST_IN_HEAP = 32 << 20
"""Maximum size in bytes of allocations on the heap (glibc's limit). Larger allocations are mapped separately."""


def available_cores() -> int:
    """Return the number of cores, at least 1, that this process may use under its CPU affinity and control groups."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.ceil(min(cores, _quota())))


def _quota() -> float:
    """Return the number of cores to which this process's control groups limit it, or infinity without a limit."""
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
    """Current activity of a starting process, displayed by the process that waits for it."""

    name = ""


def set_stage(name: str) -> None:
    """Set the current activity of this process. Workers report the activity to the driver with their heartbeats."""
    Stage.name = name


@contextmanager
def loading() -> Iterator[None]:
    """Suspend garbage collection inside a block that imports modules or creates long-lived objects.

    Objects that exist at the end of the block are excluded from later collections.

    Without suspension, scans of all imported modules would take a quarter of vLLM's import time. Without the exclusion,
    every full collection would repeat these scans.
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
    """Limit the growth of the process's address space to ``more`` bytes inside the block.

    Allocations beyond the limit fail. In Python, they raise ``MemoryError``. On systems other than Linux, the limit has
    no effect.
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
    """Configure the C library to reuse the memory of freed tensors of up to ``LARGEST_IN_HEAP`` bytes.

    Without these settings, the operating system clears every newly allocated page. Clearing takes a third of the time
    of a small model's forward pass, or of a step with a 135-million-parameter model. Call :func:`return_freed_memory`
    to release the memory. Returns whether the C library supports these settings, as glibc does.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return all(mallopt(*setting) for setting in ((M_TRIM_THRESHOLD, KEPT_BYTES), (M_MMAP_THRESHOLD, LARGEST_IN_HEAP)))


def return_freed_memory() -> None:
    """Return the memory of freed tensors to the system. Call this function before using tensors of other sizes."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def restore_umask() -> None:
    """Restore the user's umask in a process that was started under a stricter one."""
    if UMASK in os.environ:
        os.umask(int(os.environ[UMASK], 8))


@contextmanager
def private_files() -> Iterator[None]:
    """Make files private that this process or its children create in the block. Workers call :func:`restore_umask`."""
    # Set the variable first, so that every process that starts under the stricter umask knows the user's umask.
    before = os.umask(0o077)
    os.umask(before)
    os.environ.setdefault(UMASK, f"{before:o}")
    os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)
