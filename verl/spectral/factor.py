"""Blocked Cholesky factorisation of ``I + G / t`` for many matrices and shifts at once.

Left-looking, by panels of columns. Nearly all work is batched matrix products, which use a GPU's matrix units and a
CPU's vector units; LAPACK, or the GPU's kernels for small matrices, factors the diagonal blocks.
"""

import torch
from torch import Tensor

PANEL = {"cpu": 48, "cuda": 64}
"""Columns per panel, by device type. On CPUs a multiple of 64 maps the rows of a block to the same cache sets: 64
columns were a fifth slower than 48 for matrices of 512 rows (AMD EPYC, MKL)."""


def device_kind(device: torch.device) -> str:
    """``cpu`` or ``cuda``: the key of constants that are tuned by kind of device."""
    return "cpu" if device.type == "cpu" else "cuda"


def log_pivots(gram: Tensor, inverse_shifts: Tensor, workspace: Tensor) -> tuple[Tensor, Tensor]:
    """``2 log L_ii`` of the Cholesky factors ``L L^T = I + G / t``, for b matrices and g shifts each.

    Args:
        gram: ``[b, n, n]`` symmetric positive semidefinite G; only the lower triangle is read.
        inverse_shifts: ``[b, g]`` 1 / t.
        workspace: memory for at least ``b * g * n * n`` elements.

    Returns:
        The logarithms ``[b, g, n]``, and ``[b, g]``, the number of rows before the first pivot that was not positive;
        later rows are invalid.
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
        # 1. The panel's columns of I + G / t, from the diagonal down.
        block = gram[:, None, start:, start:stop] * inverse_shifts[:, :, None, None]
        block.diagonal(dim1=2, dim2=3).add_(1)
        block = block.view(batch * group, -1, width)
        # 2. Subtract the products with the columns factored before: A[:, J] - L[:, :J] L[J, :J]^T.
        if start:
            block.baddbmm_(lower[:, start:, :start], lower[:, start:stop, :start].mT, alpha=-1)
        # 3. Factor the diagonal block.
        corner, info = torch.linalg.cholesky_ex(block[:, :width])
        infos.append(info)
        pivots[:, start:stop] = corner.diagonal(dim1=1, dim2=2)
        if stop < size:
            # 4. Solve for the rows below it. A product with the triangle's inverse would lose digits where the triangle
            #    is ill-conditioned. The triangle itself is not stored: later panels read only the rows below it.
            below = torch.linalg.solve_triangular(corner, block[:, width:].mT, upper=False)
            lower[:, stop:, start:stop] = below.mT
    # 5. The first row whose pivot was not positive, over all panels.
    failures = torch.stack(infos, dim=1)
    first_row = panel * torch.arange(len(infos), device=gram.device)
    valid = torch.where(failures > 0, first_row + failures - 1, size).amin(1)
    return pivots.log().mul_(2).view(batch, group, size), valid.view(batch, group)
