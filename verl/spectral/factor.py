"""Blocked Cholesky factorisation of batches of matrices.

The algorithm is left-looking over panels of columns. Nearly all time is spent in batched matrix products, which use a
GPU's matrix units or a CPU's vector units. LAPACK or a GPU's small-matrix kernels factor the diagonal blocks.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from verl.spectral.bounds import PADDING

TILE_OPERATIONS = 2.0**28
"""Maximum number of floating-point operations per tile of :func:`add_product` on a CPU. Tiles of the minimum size, 16
rows, may exceed it. Tiles of 128 rows would be faster for large matrices but would change the last bits of results."""

PANEL = {"cpu": 48, "cuda": 64}
"""Number of columns per panel, by device type. On CPUs, multiples of 64 map the rows of a block to the same cache sets,
so with 512 rows, panels of 64 columns were 20 % slower than panels of 48 (AMD EPYC, MKL)."""

HEAD_SHARE = 0.45
HEAD_PANELS = 5
HEAD_FROM = 192
"""Minimum number of rows for a :class:`Head` on a CPU. A head has ``HEAD_SHARE`` of the rows, rounded to whole panels,
and at most ``HEAD_PANELS`` panels. Heads make the factorisation of 512 rows 25 % faster."""


def device_kind(device: torch.device) -> str:
    """Return ``cpu`` or ``cuda``, the keys of constants that are tuned per device type."""
    return "cpu" if device.type == "cpu" else "cuda"


class Head(NamedTuple):
    """Eigendecomposition of the first m rows and columns of G, shared by all shifts.

    With G_11 = V diag(l) V^T and W = G_21 V, eliminating these rows from I + G / t leaves I + (G_22 - W diag(1 / (t +
    l)) W^T) / t. For each t, a product with W thus replaces a triangular solve. The errors of the product are as small
    as rounding errors in G, since V is orthogonal up to rounding.
    """

    eigenvalues: Tensor
    """Nonnegative eigenvalues l, ``[b, m]``."""
    below: Tensor
    """Matrix W, ``[b, n - m, m]``."""


def add_product(out: Tensor, left: Tensor, right: Tensor, lower: bool = False) -> None:
    """Add ``left @ right`` (``[b, m, k] @ [b, k, n]``) to ``out`` in row tiles. ``lower`` skips the upper triangle."""
    rows, columns = out.shape[1:]
    tile = 128
    if out.device.type == "cpu":
        tile = min(tile, max(16, int(TILE_OPERATIONS / (2 * len(out) * left.shape[2] * columns + 1))))
    for start in range(0, rows, tile):
        stop = min(start + tile, rows)
        last = stop if lower else columns
        out[:, start:stop, :last].baddbmm_(left[:, start:stop], right[:, :, :last])


def head_columns(rows: int, kind: str) -> int:
    """Return the size m of the :class:`Head` for ``rows``, or 0 if a head would not be faster, as on GPUs."""
    if kind != "cpu" or rows < HEAD_FROM:
        return 0
    return PANEL[kind] * min(HEAD_PANELS, round(HEAD_SHARE * rows / PANEL[kind]))


def decompose_head(gram: Tensor, columns: int) -> Head:
    """Return the :class:`Head` of ``gram [b, n, n]``, of which only the lower triangle is read."""
    values, vectors = [], []
    for matrix in gram[:, :columns, :columns]:
        eigenvalues, basis = torch.linalg.eigh(matrix)
        values.append(eigenvalues.clamp_(min=0))
        vectors.append(basis)
    rows = gram[:, columns:, :columns]
    below = torch.zeros_like(rows)
    add_product(below, rows, torch.stack(vectors))
    return Head(torch.stack(values), below)


def log_pivots(
    gram: Tensor, inverse_shifts: Tensor, workspace: Tensor, head: Head | None = None
) -> tuple[Tensor, Tensor]:
    """Return ``2 log L_ii`` of the Cholesky factors L of I + G / t, for b matrices G with g shifts t each.

    Args:
        gram: Symmetric positive semidefinite G, ``[b, n, n]``; only the lower triangle is read.
        inverse_shifts: Values of 1 / t, ``[b, g]``.
        workspace: Buffer of at least ``b * g * r * (r + PADDING)`` elements, where r is n, or max(m, n - m) with a head
            of m < n columns.
        head: Head of G or of larger matrices whose leading block is G, or None.

    Returns:
        Logarithms ``[b, g, n]``, and the number of rows before the first nonpositive pivot, ``[b, g]``. Logarithms of
        later rows are invalid.
    """
    size = gram.shape[1]
    if head is None or head.eigenvalues.shape[1] >= size:
        return _log_pivots(gram, inverse_shifts, workspace)
    columns = head.eigenvalues.shape[1]
    first, sound = _log_pivots(gram[:, :columns, :columns], inverse_shifts, workspace)
    head = Head(head.eigenvalues, head.below[:, : size - columns])
    rest, valid = _log_pivots(gram[:, columns:, columns:], inverse_shifts, workspace, head)
    return torch.cat([first, rest], dim=2), torch.where(sound < columns, sound, columns + valid)


def _log_pivots(
    gram: Tensor, inverse_shifts: Tensor, workspace: Tensor, head: Head | None = None
) -> tuple[Tensor, Tensor]:
    """Implement :func:`log_pivots` for I + G / t or, with a head, for I + (G - W diag(1 / (t + l)) W^T) / t."""
    batch, size = gram.shape[:2]
    group = inverse_shifts.shape[1]
    inverse = inverse_shifts[:, :, None]
    shares = None if head is None else inverse / (1 / inverse + head.eigenvalues[:, None])

    def panel(start: int, stop: int) -> Tensor:
        blocks = gram[:, None, start:, start:stop] * inverse[..., None]
        blocks.diagonal(dim1=2, dim2=3).add_(1)
        if head is not None and shares is not None:
            scaled = head.below[:, None, start:stop] * shares[:, :, None]
            for block, below, part in zip(blocks, head.below[:, start:], scaled, strict=True):
                block.baddbmm_(below.expand(group, -1, -1), part.mT, alpha=-1)
        return blocks.view(batch * group, -1, stop - start)

    stored = workspace[: batch * group * size * (size + PADDING)].view(batch * group, size, -1)
    pivots, valid = factor_columns(panel, stored[:, :, :size])
    return pivots.log_().mul_(2).view(batch, group, size), valid.view(batch, group)


def factor_columns(panel: Callable[[int, int], Tensor], lower: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the first n columns of the Cholesky factors of m matrices of R rows.

    Args:
        panel: Function ``panel(start, stop)`` that returns columns ``start:stop`` of the matrices, from row ``start``
            on, as a new tensor ``[m, R - start, stop - start]``.
        lower: Output ``[m, R, n]`` for the factors, except for the diagonal blocks of the panels.

    Returns:
        Diagonals ``[m, n]``, and the number of rows before the first nonpositive pivot, ``[m]``. Diagonal entries of
        later rows are invalid.
    """
    count, height, size = lower.shape
    width = PANEL[device_kind(lower.device)]
    pivots = lower.new_empty(count, size)
    infos = []
    for start in range(0, size, width):
        stop = min(start + width, size)
        # 1. Compute the panel's columns from the diagonal down.
        block = panel(start, stop)
        # 2. Subtract the products with previously factored columns: A[:, J] - L[:, :J] L[J, :J]^T.
        if start:
            block.baddbmm_(lower[:, start:, :start], lower[:, start:stop, :start].mT, alpha=-1)
        # 3. Factor the diagonal block.
        corner, info = torch.linalg.cholesky_ex(block[:, : stop - start])
        infos.append(info)
        pivots[:, start:stop] = corner.diagonal(dim1=1, dim2=2)
        if stop < height:
            # 4. Solve for the rows below. Multiplying by the triangle's inverse would lose digits if the triangle is
            #    ill-conditioned. The triangle is not stored, since later panels read only the rows below it.
            below = lower[:, stop:, start:stop].mT
            torch.linalg.solve_triangular(corner, block[:, stop - start :].mT, upper=False, out=below)
    # 5. Find the first nonpositive pivot over all panels.
    failures = torch.stack(infos, dim=1)
    first_row = width * torch.arange(len(infos), device=lower.device)
    return pivots, torch.where(failures > 0, first_row + failures - 1, size).amin(1)
