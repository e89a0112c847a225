"""Measures the peak memory of worker calls."""

from pathlib import Path
from typing import NamedTuple

import psutil
import torch

CLEAR_REFS, STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")
RESET_PEAK = "5"
"""Value to write to ``clear_refs`` to reset a process's peak resident memory (Linux, man 5 proc)."""


class MemoryPeak(NamedTuple):
    """Peak memory use in bytes."""

    used: int
    """Memory of all tensors in this process, including the engine's, or resident memory of the process on a CPU."""
    reserved: int
    """Memory reserved by torch's allocator, including free blocks, or the same as ``used`` on a CPU."""

    def joined(self, other: "MemoryPeak | None") -> "MemoryPeak":
        """Return the element-wise maximum of the two peaks."""
        return self if other is None else MemoryPeak(*map(max, self, other))


class PeakMemory:
    """Peak memory of this process since the last ``reset``. Each measurement or reset takes a few microseconds."""

    def __init__(self, device_type: str) -> None:
        """Measure the current GPU if ``device_type`` is ``"cuda"``, or the host otherwise."""
        self._on_gpu = device_type == "cuda"
        self._resets = False

    def reset(self) -> None:
        """Start a new measurement."""
        if self._on_gpu:
            torch.cuda.reset_peak_memory_stats()
            return
        try:
            CLEAR_REFS.write_text(RESET_PEAK)
            self._resets = True
        except OSError:
            # Not Linux, or a container that forbids it: `read` then returns the current resident memory.
            self._resets = False

    def read(self) -> MemoryPeak:
        """Return the peak since the last ``reset``, or the current memory use if the host's peak cannot be reset."""
        if self._on_gpu:
            return MemoryPeak(torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
        if self._resets:
            line = next(line for line in STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
            used = int(line.split()[1]) << 10
        else:
            used = resident_bytes()
        return MemoryPeak(used, used)


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes."""
    return int(psutil.Process().memory_info().rss)
