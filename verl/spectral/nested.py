"""Spectral sums of every prefix of every response from one factorisation per shift.

z_k = sqrt((k - 1) / k) (x_k - mean of x_1..x_(k-1)) are the Helmert contrasts of a response's rows. The scatter matrix
of the first k rows, centred on their own mean, is S_k = sum_{i<=k} z_i z_i^T: centring has become nested. With the
factorisation L L^T = I + Z Z^T / t of all contrasts, the leading blocks of L are the factors of the leading blocks, so

    log det(I + S_k / t) = sum_{i<=k} 2 log L_ii        for every k at once,

and a weighted sum over shifts t gives any sum over the eigenvalues of S_k (:mod:`verl.spectral.nodes`). When a
response is long compared with D, blocks of rows are factored one by one with what came before folded into a D x D
matrix; the cost is then linear in n. Derivation and error analysis: docs/spectral.md.

Shapes: b responses, n rows (padded with zero rows), D hidden size, g shifts, F functions.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from verl.spectral.factor import log_pivots
from verl.spectral.nodes import NodeSet

SMALLEST_TRACE = 1e-270
"""Traces below this share of 1, the square of the largest entry, are too near the end of float64's range."""


class Scatter(NamedTuple):
    """What the shifts share."""

    gram: Tensor | None
    """Lower triangle of Z Z^T ``[b, n, n]`` when the whole response is one block."""
    blocks: Tensor
    """Contrasts in blocks ``[b, blocks, s, D]``, zero past the end."""
    before: Tensor | None
    """Scatter of what comes before each block ``[b, blocks, D, D]``, unless there is one alone."""
    trace: Tensor
    """tr S_k for k = 1..n: ``[b, n]``."""
    norm: Tensor
    """Frobenius norm of S_k, sqrt(tr S_k^2), or a larger bound on its largest eigenvalue: ``[b, n]``."""


class Sums(NamedTuple):
    """Sums over the singular values of each prefix, each prefix in a scale of its own."""

    sums: Tensor
    """``[F, b, P]``, of the singular values divided by ``scale``; 0 for prefixes without any."""
    scale: Tensor
    """``[b, P]``, 1 for prefixes without singular values."""
    failed: Tensor
    """``[b]``: a pivot was not positive, or a prefix is too small beside what follows it: the sums mean nothing."""


def block_rows(rows: int, width: int) -> int:
    """Rows per block that minimise the operations of one shift: all of them, or D for long responses."""
    return min((rows, min(rows, width)), key=lambda size: factor_operations(rows, width, size))


def factor_operations(rows: int, width: int, size: int) -> float:
    """Floating-point operations of one shift for one response in blocks of ``size`` rows."""
    blocks = math.ceil(rows / size)
    if blocks == 1:
        return rows**3 / 3
    per_block = width**3 / 3 + width**2 * size + 2 * width * size**2 + size**3 / 3
    return blocks * per_block


def elements_per_shift(rows: int, width: int) -> int:
    """Elements that one response and shift take: the factor and its first panel, or each block's factor, D x D system,
    its factor, and the contrasts and their Gram matrix under it."""
    size = block_rows(rows, width)
    blocks = math.ceil(rows / size)
    return size * (size + 64) if blocks == 1 else blocks * (2 * size * size + 2 * width * width + 2 * width * size)


def nested_bytes(rows: int, width: int, shifts: int) -> int:
    """Memory of one response if all its shifts are factored at once; its contrasts with two temporaries, and Z Z^T with
    a copy or the scatter before each block, come on top of the shifts."""
    size = block_rows(rows, width)
    shared = 2 * rows * rows if size == rows else 2 * math.ceil(rows / size) * width * width
    return 8 * (3 * rows * width + shared + shifts * elements_per_shift(rows, width))


def contrasts(rows: Tensor, lengths: Tensor) -> Tensor:
    """Helmert contrasts ``[b, n, D]`` of ``rows [b, n, D]``: the first is 0, and so are those past ``lengths [b]``.

    Row k is ``sqrt((k - 1) / k)`` times its distance from the mean of the rows before it.
    """
    before = torch.arange(1, rows.shape[1], dtype=rows.dtype, device=rows.device)[:, None]
    means = rows[:, :-1].cumsum(1).div_(before)
    result = torch.empty_like(rows)
    result[:, 0] = 0.0
    torch.sub(rows[:, 1:], means, out=result[:, 1:]).mul_((before / (before + 1)).sqrt())
    past_end = torch.arange(rows.shape[1], device=rows.device) >= lengths[:, None]
    return result.masked_fill_(past_end[:, :, None], 0.0)


def nested_sums(states: Tensor, prefixes: Tensor, nodes: NodeSet, workspace_bytes: int) -> Sums:
    """Sums of the fitted functions over the spectrum of each prefix.

    Args:
        states: contrasts of each response's rows, float64 ``[b, n, D]``.
        prefixes: ``[b, P]`` rows k of each prefix, at most the response's length; P is at least 1.
        nodes: the fit, of F functions.
        workspace_bytes: bound on the memory for matrices; one matrix may exceed it.
    """
    scatter = _scatter(states)
    window = _window(scatter, prefixes, nodes)
    logs, failed = _prefix_logs(scatter, window, nodes, workspace_bytes)
    return Sums(window.sums(logs, nodes), window.scale, failed | lost_to_underflow(states))


def lost_to_underflow(states: Tensor) -> Tensor:
    """``[b]``: a prefix of contrasts ``[b, n, D]`` is not 0, but so small that its squares are, or nearly."""
    return ((states.abs().amax(2) > 0) & (states.square().sum(2).cumsum(1) < SMALLEST_TRACE)).any(1)


class _Window(NamedTuple):
    """Where each prefix reads the shifts: all ``[b, P]``.

    The Frobenius norm of S_k bounds its largest eigenvalue. Shifts are counted from the largest norm of the response; a
    prefix whose norm is ratio^m times smaller reads its determinants m shifts further down, as if scaled up.
    """

    rows: Tensor
    present: Tensor
    """Whether the prefix has a spectrum."""
    offset: Tensor
    """The m above."""
    trace: Tensor
    """Trace in units of the square of ``scale``, or 0 where absent."""
    norm: Tensor
    """Norm in the same units: in (1 / ratio, 1], or 0 where absent."""
    scale: Tensor

    def sums(self, logs: Tensor, nodes: NodeSet) -> Tensor:
        """Sums ``[F, b, P]`` from the determinants ``[b, Q, P]`` of shifts counted from the response's largest."""
        at = self.offset[:, None] + torch.arange(len(nodes.shifts), device=logs.device)[:, None]
        return torch.where(self.present, nodes.sums(logs.gather(1, at), self.trace, self.norm), 0.0)


def _window(scatter: Scatter, prefixes: Tensor, nodes: NodeSet) -> _Window:
    last = (prefixes - 1).clamp(min=0)
    trace, norm = scatter.trace.gather(1, last), scatter.norm.gather(1, last)
    present = (prefixes >= 2) & (trace >= SMALLEST_TRACE)
    # The grid is anchored at the response's first trace, so that where a prefix falls between two shifts does not
    # depend on the rows that follow it.
    anchor = torch.where(scatter.trace >= SMALLEST_TRACE, scatter.trace, torch.inf).amin(1, keepdim=True)
    step = torch.where(present, (norm / anchor).log() / math.log(nodes.ratio), 0.0).ceil()
    offset = torch.where(present, step.masked_fill(~present, -torch.inf).amax(1, keepdim=True) - step, 0.0)
    square = torch.where(present, anchor * nodes.ratio**step, 1.0)
    trace, norm = (torch.where(present, part / square, 0.0) for part in (trace, norm))
    return _Window(prefixes, present, offset.long(), trace, norm.clamp(max=1), square.sqrt())


def _prefix_logs(scatter: Scatter, window: _Window, nodes: NodeSet, workspace_bytes: int) -> tuple[Tensor, Tensor]:
    """Determinants of all shifts that a prefix reads: ``[b, Q, P]``, and failures ``[b]``.

    A shift past the first n serves only prefixes with an offset, so only their rows are factored. A response has failed
    if a pivot within the rows that a shift serves was not positive.
    """
    batch, count = window.rows.shape
    serves = _rows_served(window, len(nodes.shifts))
    needed = serves.amax(0).tolist()
    # The largest shift of a response is t_0 times the square of its largest prefix's scale.
    square = torch.where(window.present, window.scale.square(), 0.0).amax(1, keepdim=True)
    first = torch.where(square > 0, square, 1.0) * float(nodes.shifts[0])
    shifts = first * nodes.ratio ** -torch.arange(len(needed), dtype=first.dtype, device=first.device)
    per_shift = elements_per_shift(math.prod(scatter.blocks.shape[1:3]), scatter.blocks.shape[3])
    group = max(1, min(len(needed), workspace_bytes // (8 * batch * per_shift)))
    size = scatter.blocks.shape[2]
    workspace = first.new_empty(batch * group * scatter.blocks.shape[1] * size * size)
    logs = first.new_zeros(batch, len(needed), count)
    failed = torch.zeros(batch, dtype=torch.bool, device=first.device)
    low = 0
    while low < len(needed) and needed[low] > 0:
        # Shifts that serve far fewer rows than the group's first are cheaper in a group of their own.
        high = low + sum(rows > needed[low] // 2 for rows in needed[low : low + group])
        determinants, valid = log_determinants(scatter, shifts[:, low:high], needed[low], workspace)
        at = (window.rows - 1).clamp(min=0, max=needed[low] - 1)
        logs[:, low:high] = determinants.gather(2, at[:, None].expand(-1, high - low, -1))
        failed |= (valid < serves[:, low:high]).any(1)
        low = high
    return logs, failed


def _rows_served(window: _Window, count: int) -> Tensor:
    """Rows of the longest prefix of each response that reads shift q: ``[b, Q]``.

    The first ``count`` shifts serve all prefixes, shift q above them those with an offset of at least q - count + 1.
    """
    rows = window.rows * window.present
    longest = rows.new_zeros(len(rows), int(window.offset.max()) + 1)
    longest.scatter_reduce_(1, window.offset, rows, "amax")
    longest = longest.flip(1).cummax(1).values.flip(1)
    shift = torch.arange(count + longest.shape[1] - 1, device=rows.device)
    return longest[:, (shift - count + 1).clamp(min=0)]


def _scatter(states: Tensor) -> Scatter:
    """What all shifts need of contrasts ``[b, n, D]``."""
    batch, count, width = states.shape
    size = block_rows(count, width)
    if size == count:
        gram = lower_gram(states)
        trace, square = (part.cumsum(1) for part in _moments(gram))
        return Scatter(gram, states[:, None], None, trace, _norm(trace, square))
    number = math.ceil(count / size)
    blocks = torch.nn.functional.pad(states, (0, 0, 0, number * size - count)).view(batch, number, size, width)
    products = blocks.mT @ blocks
    # Subtracting from the inclusive sum would round a small part before a large one to nothing.
    before = torch.cat([torch.zeros_like(products[:, :1]), products[:, :-1].cumsum(1)], dim=1)
    trace, square = _moments(blocks @ blocks.mT)
    square = square + 2 * ((blocks @ before) * blocks).sum(-1)
    trace, square = (part.flatten(1)[:, :count].cumsum(1) for part in (trace, square))
    return Scatter(None, blocks, before, trace, _norm(trace, square))


def _moments(gram: Tensor) -> tuple[Tensor, Tensor]:
    """What row i adds to tr S and to tr S^2 within its block: K_ii, and K_ii^2 + 2 sum_{j<i} K_ij^2, of ``gram`` K."""
    diagonal = gram.diagonal(dim1=-2, dim2=-1)
    return diagonal, 2 * gram.tril().square().sum(-1) - diagonal.square()


def _norm(trace: Tensor, square: Tensor) -> Tensor:
    """sqrt(tr S^2), or where that is lost to underflow the trace, which bounds the largest eigenvalue as well."""
    return torch.where(square > SMALLEST_TRACE, square.clamp(min=0).sqrt(), trace)


def lower_gram(rows: Tensor, tile: int = 128) -> Tensor:
    """Lower triangle of ``rows @ rows.mT`` ``[b, n, n]``; above the diagonal only zeros or the same products."""
    gram = rows.new_zeros(rows.shape[0], rows.shape[1], rows.shape[1])
    for start in range(0, rows.shape[1], tile):
        stop = min(start + tile, rows.shape[1])
        gram[:, start:stop, :stop] = rows[:, start:stop] @ rows[:, :stop].mT
    return gram


def log_determinants(scatter: Scatter, shifts: Tensor, rows: int, workspace: Tensor) -> tuple[Tensor, Tensor]:
    """log det(I + S_k / t) for k = 1..rows of every response and shift.

    ``shifts [b, g]`` positive; ``workspace`` is float64 memory for the factors of all blocks and shifts.

    Returns:
        float64 ``[b, g, rows]``, and ``[b, g]``, the number of rows for which they hold: those before the first pivot
        that is not positive, which happens with shifts below the rounding error of the Gram matrix.
    """
    if scatter.gram is not None:
        logs, valid = log_pivots(scatter.gram[:, :rows, :rows], 1 / shifts, workspace)
    else:
        logs, valid = _block_log_pivots(scatter, shifts, rows, workspace)
    return logs.cumsum(-1), valid


def _block_log_pivots(scatter: Scatter, shifts: Tensor, rows: int, workspace: Tensor) -> tuple[Tensor, Tensor]:
    """As of the whole, block by block: with S the scatter of what comes before a block Z_b, the Schur complement of
    I + Z Z^T / t is I + Z_b (S + t I)^{-1} Z_b^T, a sum of positive terms, so nothing cancels."""
    assert scatter.before is not None
    batch, group = shifts.shape
    size = scatter.blocks.shape[2]
    count = math.ceil(rows / size)
    blocks, before = scatter.blocks[:, :count], scatter.before[:, :count]
    system = before[:, None].repeat(1, group, 1, 1, 1)
    system.diagonal(dim1=3, dim2=4).add_(shifts[:, :, None, None])
    lower, info = torch.linalg.cholesky_ex(system)
    inner = torch.linalg.solve_triangular(lower, blocks.mT[:, None].expand(-1, group, -1, -1, -1), upper=False)
    gram = (inner.mT @ inner).view(-1, size, size)
    logs, valid = log_pivots(gram, gram.new_ones(len(gram), 1), workspace)
    valid = torch.where(info > 0, 0, valid.view(batch, group, count))
    first_row = size * torch.arange(count, device=valid.device)
    return (
        logs.reshape(batch, group, count * size)[..., :rows],
        torch.where(valid < size, first_row + valid, rows).amin(2),
    )
