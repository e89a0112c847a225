"""Peak memory of a worker's calls."""

from pathlib import Path
from typing import NamedTuple

import psutil
import torch

CLEAR_REFS, STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")
RESET_PEAK = "5"
"""Written to ``clear_refs``, it resets the process's peak resident memory (Linux, man 5 proc)."""


class MemoryPeak(NamedTuple):
    """Most memory in use at one time, in bytes."""

    used: int
    """On a GPU what tensors took, of all models and the engine in this process; on a CPU the process's resident
    memory."""
    reserved: int
    """On a GPU what torch's allocator held, with its free blocks; on a CPU as ``used``."""

    def joined(self, other: "MemoryPeak | None") -> "MemoryPeak":
        """Return the larger of each."""
        return self if other is None else MemoryPeak(*map(max, self, other))


class PeakMemory:
    """Peak memory of this process since the last ``reset``; both take some microseconds."""

    def __init__(self, device_type: str) -> None:
        """Measure the host, or with ``device_type="cuda"`` the current device."""
        self._on_gpu = device_type == "cuda"
        self._resets = False

    def reset(self) -> None:
        """Count from now on."""
        if self._on_gpu:
            torch.cuda.reset_peak_memory_stats()
            return
        try:
            CLEAR_REFS.write_text(RESET_PEAK)
            self._resets = True
        except OSError:
            # Not Linux, or a container that forbids it: `read` returns the memory resident at the end.
            self._resets = False

    def read(self) -> MemoryPeak:
        """Return the peak since the last ``reset``; on a CPU without Linux's /proc the present use."""
        if self._on_gpu:
            return MemoryPeak(torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
        if self._resets:
            line = next(line for line in STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
            used = int(line.split()[1]) << 10
        else:
            used = resident_bytes()
        return MemoryPeak(used, used)


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    return int(psutil.Process().memory_info().rss)
