"""Settings of a process: its cores, garbage collection, allocator and umask. Light, as entry points import it first."""

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
"""Variable with the user's mask, for processes that start under a stricter one."""

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's ``mallopt``."""
KEPT_BYTES = 256 << 20
"""Most free memory that is kept at the end of the heap."""
LARGEST_IN_HEAP = 32 << 20
"""Larger requests are mapped separately; glibc allows no higher limit."""


def available_cores() -> int:
    """Return the number of cores that this process may use, by affinity and control groups; at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.ceil(min(cores, _quota())))


def _quota() -> float:
    """Cores' worth of time that the process's control groups give it; infinite without a limit."""
    groups = [line.partition("::")[2] for line in _words(Path("/proc/self/cgroup")) if line.startswith("0::")]
    # Inside a container its own group is often the root; outside each group obeys those above it.
    below = [CGROUPS / group.lstrip("/") for group in groups]
    folders = {CGROUPS, *(f for folder in below for f in (folder, *folder.parents) if f.is_relative_to(CGROUPS))}
    limits = [_words(folder / "cpu.max") for folder in folders]
    # The first version of control groups.
    limits.append(_words(CGROUPS / "cpu/cpu.cfs_quota_us") + _words(CGROUPS / "cpu/cpu.cfs_period_us"))
    shares = [int(limit[0]) / int(limit[1]) for limit in limits if len(limit) == 2 and limit[0].isdigit()]
    return min(shares, default=math.inf)


def _words(file: Path) -> list[str]:
    try:
        return file.read_text().split()
    except OSError:
        return []


class Stage:
    """Activity of a starting process, for a process that waits for it."""

    name = ""


def set_stage(name: str) -> None:
    """Say what this process does from now on; a worker's heartbeats carry it to the driver."""
    Stage.name = name


@contextmanager
def loading() -> Iterator[None]:
    """Suspend garbage collection for imports and objects that live as long as the process.

    What exists at the end of the block is never scanned again.

    Otherwise the collector scans the modules again and again while they grow, a quarter of the time that vLLM takes to
    import, and later all of them in every full collection.
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
    """Collect garbage once, and leave all that exists now out of later collections."""
    gc.collect()
    gc.freeze()


@contextmanager
def memory_limit(more: int) -> Iterator[None]:
    """Limit the process to ``more`` bytes of address space than now, within the block.

    An allocation beyond that fails, in Python with ``MemoryError``. Without effect where the system does not count
    address space (macOS).
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

    The system clears pages before it hands them out, which takes a third of a forward pass of a small model, and of a
    step of one of 135 million parameters. :func:`return_freed_memory` takes back what is then held. Returns whether the
    C library has these settings, as glibc does.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return all(mallopt(*setting) for setting in ((M_TRIM_THRESHOLD, KEPT_BYTES), (M_MMAP_THRESHOLD, LARGEST_IN_HEAP)))


def return_freed_memory() -> None:
    """Give the memory of freed tensors back to the system, before work that needs other sizes."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def restore_umask() -> None:
    """Create files with the user's own permissions again, in a process that started under a stricter mask."""
    if UMASK in os.environ:
        os.umask(int(os.environ[UMASK], 8))


@contextmanager
def private_files() -> Iterator[None]:
    """Create files of this user alone within the block, in child processes too; workers :func:`restore_umask`."""
    # First, so that no process starts under the stricter mask without knowing the user's.
    before = os.umask(0o077)
    os.umask(before)
    os.environ.setdefault(UMASK, f"{before:o}")
    os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)
