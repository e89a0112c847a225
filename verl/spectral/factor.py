"""Blocked Cholesky factorisation of many matrices at once.

Left-looking, by panels of columns. Nearly all work is batched matrix products, which use a GPU's matrix units and a
CPU's vector units; LAPACK, or the GPU's kernels for small matrices, factors the diagonal blocks.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from verl.spectral.bounds import PADDING
from verl.spectral.slices import Slices

PANEL = {"cpu": 48, "cuda": 64}
"""Columns per panel, by device type. On CPUs a multiple of 64 maps the rows of a block to the same cache sets: 64
columns were a fifth slower than 48 for matrices of 512 rows (AMD EPYC, MKL)."""


def device_kind(device: torch.device) -> str:
    """``cpu`` or ``cuda``: the key of constants that are tuned by kind of device."""
    return "cpu" if device.type == "cpu" else "cuda"


def log_pivots(gram: Tensor, inverse_shifts: Tensor, workspace: Tensor) -> Slices[tuple[Tensor, Tensor]]:
    """``2 log L_ii`` of the Cholesky factors ``L L^T = I + G / t``, for b matrices and g shifts each.

    Args:
        gram: ``[b, n, n]`` symmetric positive semidefinite G; only the lower triangle is read.
        inverse_shifts: ``[b, g]`` 1 / t.
        workspace: memory for at least ``b * g * n * (n + PADDING)`` elements.

    Returns:
        The logarithms ``[b, g, n]``, and ``[b, g]``, the number of rows before the first pivot that was not positive;
        later rows are invalid.
    """
    batch, size = gram.shape[:2]
    group = inverse_shifts.shape[1]

    def panel(start: int, stop: int) -> Tensor:
        block = gram[:, None, start:, start:stop] * inverse_shifts[:, :, None, None]
        block.diagonal(dim1=2, dim2=3).add_(1)
        return block.view(batch * group, -1, stop - start)

    stored = workspace[: batch * group * size * (size + PADDING)].view(batch * group, size, -1)
    lower = stored[:, :, :size]
    pivots, valid = yield from factor_columns(panel, lower)
    return pivots.log_().mul_(2).view(batch, group, size), valid.view(batch, group)


def factor_columns(panel: Callable[[int, int], Tensor], lower: Tensor) -> Slices[tuple[Tensor, Tensor]]:
    """The first n columns of the Cholesky factors of m matrices of R rows, in slices of one panel.

    Args:
        panel: ``panel(start, stop)`` is a new tensor ``[m, R - start, stop - start]``, these columns of the matrices
            from row ``start`` on.
        lower: ``[m, R, n]``, receives the factors, except for the diagonal blocks of the panels.

    Returns:
        The diagonals ``[m, n]``, and ``[m]``, the number of rows before the first pivot that was not positive; later
        rows are invalid.
    """
    count, height, size = lower.shape
    width = PANEL[device_kind(lower.device)]
    pivots = lower.new_empty(count, size)
    infos = []
    for start in range(0, size, width):
        stop = min(start + width, size)
        # 1. The panel's columns, from the diagonal down.
        block = panel(start, stop)
        # 2. Subtract the products with the columns factored before: A[:, J] - L[:, :J] L[J, :J]^T.
        if start:
            block.baddbmm_(lower[:, start:, :start], lower[:, start:stop, :start].mT, alpha=-1)
        # 3. Factor the diagonal block.
        corner, info = torch.linalg.cholesky_ex(block[:, : stop - start])
        infos.append(info)
        pivots[:, start:stop] = corner.diagonal(dim1=1, dim2=2)
        if stop < height:
            # 4. Solve for the rows below it. A product with the triangle's inverse would lose digits where the triangle
            #    is ill-conditioned. The triangle itself is not stored: later panels read only the rows below it.
            below = torch.linalg.solve_triangular(corner, block[:, stop - start :].mT, upper=False)
            lower[:, stop:, start:stop] = below.mT
        yield
    # 5. The first row whose pivot was not positive, over all panels.
    failures = torch.stack(infos, dim=1)
    first_row = width * torch.arange(len(infos), device=lower.device)
    return pivots, torch.where(failures > 0, first_row + failures - 1, size).amin(1)
