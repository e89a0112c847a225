"""The cores that this process may use: those of its machine, less what a scheduler or a container holds back."""

import math
import os
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")


def own_cores() -> int:
    """Cores of this machine that this process may use; at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.ceil(min(cores, _quota())))


def _quota() -> float:
    """Cores' worth of time that the process's control groups give it; infinite without a limit."""
    own = [line.partition("::")[2] for line in _words(Path("/proc/self/cgroup")) if line.startswith("0::")]
    # Inside a container its own group is often the root; outside each group obeys those above it.
    folders = {CGROUPS, *(folder for path in own for folder in _above(CGROUPS / path.lstrip("/")))}
    limits = [_words(folder / "cpu.max") for folder in folders]
    # The first version of control groups.
    limits.append(_words(CGROUPS / "cpu/cpu.cfs_quota_us") + _words(CGROUPS / "cpu/cpu.cfs_period_us"))
    return min(
        (
            int(quota) / int(period)
            for quota, period in (limit for limit in limits if len(limit) == 2)
            if quota.isdigit()
        ),
        default=math.inf,
    )


def _above(folder: Path) -> list[Path]:
    return [path for path in (folder, *folder.parents) if path.is_relative_to(CGROUPS)]


def _words(file: Path) -> list[str]:
    try:
        return file.read_text().split()
    except OSError:
        return []
