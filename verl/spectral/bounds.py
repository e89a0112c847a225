"""Estimates the memory needed for one response's spectra, and chooses a block size that respects a memory bound.

A response of n rows and D columns is factored either as one n x n Gram matrix or in blocks of s rows, which need
additional D x D matrices. The formulas are derived in docs/spectral.md, "Memory".
"""

import math

MAX_BYTES = 1280 * 2**20
"""Default bound on the memory for the spectra of one response."""

PADDING = 8
"""Padding between the rows of a factor, in elements (one cache line). Without padding, rows of 512 elements are 4 KiB
apart and share a few cache sets, which made products 20 % slower."""

PANELS = 3 * 64 + PADDING
"""Number of columns in a panel's temporaries: the panel, its solved part, a copy of the solved part, and padding."""

BLOCK_ROWS = 1024
"""Number of rows to convert to float64 at a time if not all rows are needed at once."""

WIDEST_WHOLE_BLOCK = 512
"""Largest D for which blocks have at least D rows. Smaller blocks would use the processor inefficiently."""


def block_rows(rows: int, width: int, max_bytes: int = MAX_BYTES) -> int:
    """Return the number of rows per block that minimises operations with at most ``max_bytes`` of memory.

    Candidates are all rows, D rows, and fractions of D rows. If none fits, the one that needs the least memory is used.
    """
    if rows <= width:
        return rows
    parts = [width] if width <= WIDEST_WHOLE_BLOCK else [math.ceil(width / 2**i) for i in range(5)]
    sizes = [rows, *parts]
    within = [size for size in sizes if response_bytes(rows, width, size) <= max_bytes]
    if not within:
        return min(sizes, key=lambda size: response_bytes(rows, width, size))
    return min(within, key=lambda size: factor_operations(rows, width, size))


def factor_operations(rows: int, width: int, size: int) -> float:
    """Return the number of floating-point operations per shift to factor a response in blocks of ``size`` rows."""
    if size == rows:
        return rows**3 / 3
    per_block = width**3 / 3 + width**2 * size + width * size**2 + size**3 / 3
    return math.ceil(rows / size) * per_block


def shift_elements(rows: int) -> int:
    """Return the number of elements per shift for a single-block response: the factor and a panel's temporaries."""
    return rows * (rows + PANELS)


def block_elements(size: int, width: int) -> int:
    """Return the number of elements per shift that a block of ``size`` rows needs.

    Memory is needed for S, the factor of S + t I with the solved rows below it, the rows and their temporaries, and the
    Gram matrix with its factor.
    """
    return 2 * width**2 + 4 * size * width + 2 * size**2 + PANELS * (width + size)


def response_bytes(rows: int, width: int, size: int, shifts: int = 1) -> int:
    """Return the bytes needed to factor one response in blocks of ``size`` rows with ``shifts`` shifts at a time."""
    if size == rows:
        rows_in_float64 = (rows + 3 * min(rows, BLOCK_ROWS)) * width
        return 8 * (rows**2 + max(rows_in_float64, shifts * shift_elements(rows)))
    return 8 * shifts * block_elements(size, width)


def decomposition_bytes(rows: int, width: int) -> int:
    """Return the bytes needed to decompose the prefixes of one response.

    With m = min(n, D), these are rows ``[m, D]``, a block of rows with its temporaries, and three matrices of up to m +
    1024 rows, such as the Gram or scatter matrix, its part for one prefix, and the decomposition's workspace.
    """
    smaller, block = min(rows, width), min(rows, BLOCK_ROWS)
    return 8 * (smaller * width + 3 * (smaller + block) * smaller + 3 * block * width)


def workspace_bound(rows: int, width: int, decomposes: bool, max_bytes: int = MAX_BYTES) -> int:
    """Return the maximum number of bytes needed for the spectra of a response of up to n = ``rows`` rows.

    The result is ``max_bytes``, or more if the D x D matrices alone exceed this bound. In that case, factorisations
    need 8 (2 D^2 + D^2 / 4 + ...) bytes. If ``decomposes`` is set, decompositions need 8 (7 D^2 + ...) bytes. The only
    terms that grow with n are vectors of length n.
    """
    smallest = block_rows(rows, width, 1)
    floor = response_bytes(rows, width, smallest)
    if decomposes:
        floor = max(floor, decomposition_bytes(rows, width))
    return max(max_bytes, floor)
