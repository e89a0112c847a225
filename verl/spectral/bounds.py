"""How much memory the spectra of one response take, and the block size that keeps it within a bound.

One response of n rows and D columns is factored either as one n x n Gram matrix or in blocks of s rows beside D x D
matrices. docs/spectral.md, "Memory", has the formulas.
"""

import math

MAX_BYTES = 1280 * 2**20
"""Bound on the memory for the spectra of one response, by default."""

PADDING = 8
"""Numbers, one cache line, between a row of a factor and the next. Rows that are a multiple of 4 KiB apart, as those of
512 numbers are, share the same few cache sets, which made products a fifth slower."""

PANELS = 3 * 64 + PADDING
"""Columns of the temporaries of a panel: the panel, its solved part, and a copy of that; and the padding."""

BLOCK_ROWS = 1024
"""Rows that are converted to float64 at a time where not all are needed at once."""

WIDEST_WHOLE_BLOCK = 512
"""Up to this D, a block has D rows; small blocks do not use a processor well."""


def block_rows(rows: int, width: int, max_bytes: int = MAX_BYTES) -> int:
    """Return the rows of a block, all or a part of D, with the fewest operations within ``max_bytes``.

    If nothing stays within the bound, what takes the least memory.
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
    """Count the floating-point operations of one shift for one response in blocks of ``size`` rows."""
    if size == rows:
        return rows**3 / 3
    per_block = width**3 / 3 + width**2 * size + width * size**2 + size**3 / 3
    return math.ceil(rows / size) * per_block


def shift_elements(rows: int) -> int:
    """Count the numbers of a shift for a response of one block: the factor, and the temporaries of a panel."""
    return rows * (rows + PANELS)


def block_elements(size: int, width: int) -> int:
    """Count the numbers of a block of ``size`` rows and one shift.

    S, the factor of S + t I with the solved rows below, the rows with their temporaries, the Gram matrix and its
    factor.
    """
    return 2 * width**2 + 4 * size * width + 2 * size**2 + PANELS * (width + size)


def response_bytes(rows: int, width: int, size: int, shifts: int = 1) -> int:
    """Return the bytes of one response in blocks of ``size`` rows, with so many shifts at a time."""
    if size == rows:
        rows_in_float64 = (rows + 3 * min(rows, BLOCK_ROWS)) * width
        return 8 * (rows**2 + max(rows_in_float64, shifts * shift_elements(rows)))
    return 8 * shifts * block_elements(size, width)


def decomposition_bytes(rows: int, width: int) -> int:
    """Return the bytes of one response whose prefixes are decomposed.

    With m the smaller of n and D: rows ``[m, D]``; a Gram or scatter matrix, that of one prefix, and as much again for
    the decomposition, or three matrices of up to m + 1024 rows; a block of rows with its temporaries.
    """
    smaller, block = min(rows, width), min(rows, BLOCK_ROWS)
    return 8 * (smaller * width + 3 * (smaller + block) * smaller + 3 * block * width)


def workspace_bound(rows: int, width: int, decomposes: bool, max_bytes: int = MAX_BYTES) -> int:
    """Bound on the bytes that the spectra of responses of at most n = ``rows`` rows take, one at a time.

    ``max_bytes``, unless D x D matrices alone exceed it: then 8 (2 D^2 + D^2 / 4 + ...) bytes for factorisations and
    8 (7 D^2 + ...) where prefixes may be decomposed (``decomposes``). It does not grow with n beyond the vectors of
    length n.
    """
    smallest = block_rows(rows, width, 1)
    floor = response_bytes(rows, width, smallest)
    if decomposes:
        floor = max(floor, decomposition_bytes(rows, width))
    return max(max_bytes, floor)
