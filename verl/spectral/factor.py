"""Blocked Cholesky factorisation of ``I + G / t`` for many matrices and shifts at once.

Left-looking by panels of columns: nearly all work is batched matrix products, on a GPU's matrix units as on a CPU's
vector units; LAPACK, or the GPU's kernels for small matrices, factors the diagonal blocks.
"""

import torch
from torch import Tensor

PANEL = {"cpu": 48, "cuda": 64}
"""Columns factored at a time, by device type. On CPUs a multiple of 64 puts the rows of a block on the same cache
sets: 64 columns were a fifth slower than 48 for matrices of 512 rows (AMD EPYC, MKL)."""


def device_kind(device: torch.device) -> str:
    """``cpu`` or ``cuda``: what constants that were tuned by kind of device are listed under."""
    return "cpu" if device.type == "cpu" else "cuda"


def log_pivots(gram: Tensor, inverse_shifts: Tensor, workspace: Tensor) -> tuple[Tensor, Tensor]:
    """Squared diagonals of the Cholesky factors of ``I + G / t``, for b matrices and g shifts each, as logarithms.

    Args:
        gram: ``[b, n, n]`` symmetric positive semidefinite G; only the lower triangle is read.
        inverse_shifts: ``[b, g]`` 1 / t.
        workspace: memory for at least ``b * g * n * n`` elements.

    Returns:
        ``2 log L_ii``, ``[b, g, n]``, and ``[b, g]``, the number of rows before the first pivot that was not positive;
        what comes after them means nothing.
    """
    batch, size = gram.shape[:2]
    group = inverse_shifts.shape[1]
    panel = PANEL[device_kind(gram.device)]
    lower = workspace[: batch * group * size * size].view(batch * group, size, size)
    pivots = gram.new_empty(batch * group, size)
    infos = []
    for start in range(0, size, panel):
        stop = min(start + panel, size)
        width = stop - start
        block = gram[:, None, start:, start:stop] * inverse_shifts[:, :, None, None]
        block.diagonal(dim1=2, dim2=3).add_(1)
        block = block.view(batch * group, -1, width)
        if start:
            block.baddbmm_(lower[:, start:, :start], lower[:, start:stop, :start].mT, alpha=-1)
        corner, info = torch.linalg.cholesky_ex(block[:, :width])
        infos.append(info)
        pivots[:, start:stop] = corner.diagonal(dim1=1, dim2=2)
        if stop < size:
            # A product with the triangle's inverse would lose digits where the triangle is ill-conditioned. The
            # triangle itself is not stored: later panels read only the rows below it.
            below = torch.linalg.solve_triangular(corner, block[:, width:].mT, upper=False)
            lower[:, stop:, start:stop] = below.mT
    failures = torch.stack(infos, dim=1)
    first_row = panel * torch.arange(len(infos), device=gram.device)
    valid = torch.where(failures > 0, first_row + failures - 1, size).amin(1)
    return pivots.log().mul_(2).view(batch, group, size), valid.view(batch, group)
