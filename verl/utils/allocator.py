"""How the C library's allocator treats freed memory."""

import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's ``mallopt``."""

KEPT_BYTES = 256 << 20
"""Free memory at the end of the heap that is kept, at most."""

LARGEST_IN_HEAP = 32 << 20
"""Requests from here on are mapped by themselves; glibc allows no more."""


def keep_freed_memory() -> bool:
    """Have this process use the memory of freed tensors again instead of returning it to the system.

    The system clears what it hands out, page by page, which took a third of a forward pass of a small model. Returns
    whether the C library has these settings, as glibc does.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return all(mallopt(*setting) for setting in ((M_TRIM_THRESHOLD, KEPT_BYTES), (M_MMAP_THRESHOLD, LARGEST_IN_HEAP)))
