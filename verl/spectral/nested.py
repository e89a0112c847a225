"""Spectral sums of every prefix of every response from one factorisation per shift.

The Helmert contrasts z_k = sqrt((k - 1) / k) (x_k - mean of x_1..x_(k-1)) of a response's rows make centring nested:
the scatter matrix of the first k rows, centred on their own mean, is S_k = sum_{i<=k} z_i z_i^T. Factor
L L^T = I + Z Z^T / t over all contrasts Z. The leading blocks of L are the factors of the leading blocks, so

    log det(I + S_k / t) = sum_{i<=k} 2 log L_ii        for every k at once,

and a weighted sum over shifts t gives any sum over the eigenvalues of S_k (:mod:`verl.spectral.nodes`). For a response
that is long compared with D, the rows are factored in blocks, with the rows before each block folded into a D x D
matrix; the cost is then linear in n. Derivation, error analysis and the equations cited below: docs/spectral.md.

Shapes: b responses, n rows (padded with zero rows), D hidden size, P prefixes, Q shifts in groups of g, F functions.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from verl.spectral.factor import log_pivots
from verl.spectral.nodes import NodeSet

SMALLEST_TRACE = 1e-270
"""Traces below this are too near the end of float64's range; the largest entry of the rows is about 1."""


class Scatter(NamedTuple):
    """The contrasts of a chunk and everything that does not depend on the shift."""

    gram: Tensor | None
    """Lower triangle of K = Z Z^T, ``[b, n, n]``, where the whole response is one block."""
    blocks: Tensor
    """Contrasts in blocks ``[b, blocks, s, D]``, zero past the end."""
    before: Tensor | None
    """Scatter of the rows before each block ``[b, blocks, D, D]``; None where there is only one block."""
    trace: Tensor
    """tr S_k for k = 1..n: ``[b, n]``."""
    norm: Tensor
    """Frobenius norm sqrt(tr S_k^2), or a larger bound on the largest eigenvalue of S_k: ``[b, n]``."""


class Sums(NamedTuple):
    """Sums over the singular values of each prefix, each prefix in its own scale."""

    sums: Tensor
    """``[F, b, P]``, over the singular values divided by ``scale``; 0 for prefixes without any."""
    scale: Tensor
    """``[b, P]``, 1 for prefixes without singular values."""
    failed: Tensor
    """``[b]``: a pivot was not positive, or a prefix is too small beside the rows after it. The sums are invalid."""


def block_rows(rows: int, width: int) -> int:
    """Rows per block that minimise the operations per shift: all of them, or D for long responses."""
    return min((rows, min(rows, width)), key=lambda size: factor_operations(rows, width, size))


def factor_operations(rows: int, width: int, size: int) -> float:
    """Floating-point operations of one shift for one response in blocks of ``size`` rows."""
    blocks = math.ceil(rows / size)
    if blocks == 1:
        return rows**3 / 3
    per_block = width**3 / 3 + width**2 * size + 2 * width * size**2 + size**3 / 3
    return blocks * per_block


def elements_per_shift(rows: int, width: int) -> int:
    """Elements that one response takes per shift: the factor and its first panel; or, for each block, its factor, the
    D x D system and its factor, the solved contrasts and their Gram matrix."""
    size = block_rows(rows, width)
    blocks = math.ceil(rows / size)
    return size * (size + 64) if blocks == 1 else blocks * (2 * size * size + 2 * width * width + 2 * width * size)


def nested_bytes(rows: int, width: int, shifts: int) -> int:
    """Bytes of one response if all its shifts are factored at once: the shifts, the contrasts with two temporaries, and
    Z Z^T with a copy or the scatter before each block."""
    size = block_rows(rows, width)
    shared = 2 * rows * rows if size == rows else 2 * math.ceil(rows / size) * width * width
    return 8 * (3 * rows * width + shared + shifts * elements_per_shift(rows, width))


def contrasts(rows: Tensor, lengths: Tensor) -> Tensor:
    """Helmert contrasts ``[b, n, D]`` of ``rows [b, n, D]`` (eq. 1); 0 past ``lengths [b]``.

    z_1 = 0 and z_k = sqrt((k - 1) / k) (x_k - mean of x_1..x_(k-1)).
    """
    before = torch.arange(1, rows.shape[1], dtype=rows.dtype, device=rows.device)[:, None]
    means = rows[:, :-1].cumsum(1).div_(before)
    result = torch.empty_like(rows)
    result[:, 0] = 0.0
    torch.sub(rows[:, 1:], means, out=result[:, 1:]).mul_((before / (before + 1)).sqrt())
    past_end = torch.arange(rows.shape[1], device=rows.device) >= lengths[:, None]
    return result.masked_fill_(past_end[:, :, None], 0.0)


def nested_sums(states: Tensor, prefixes: Tensor, nodes: NodeSet, workspace_bytes: int) -> Sums:
    """Sums of the fitted functions over the spectrum of each prefix (eq. 5).

    Args:
        states: contrasts of each response's rows, float64 ``[b, n, D]``.
        prefixes: ``[b, P]`` rows k of each prefix, at most the response's length; P is at least 1.
        nodes: the fit of F functions.
        workspace_bytes: bound on the memory for matrices; a single matrix may exceed it.
    """
    # 1. The Gram matrix, traces and norms, which all shifts share.
    scatter = _scatter(states)
    # 2. The scale of each prefix, and from which shift it starts to read.
    window = _window(scatter, prefixes, nodes)
    # 3. The log-determinants of every prefix at every shift (eq. 2).
    logs, failed = _prefix_logs(scatter, window, nodes, workspace_bytes)
    # 4. The weighted sum over the shifts that each prefix reads (eq. 5).
    return Sums(window.sums(logs, nodes), window.scale, failed | lost_to_underflow(states))


def lost_to_underflow(states: Tensor) -> Tensor:
    """``[b]``: a prefix of contrasts ``[b, n, D]`` is not 0, but its squares are (nearly) lost to underflow."""
    return ((states.abs().amax(2) > 0) & (states.square().sum(2).cumsum(1) < SMALLEST_TRACE)).any(1)


class _Window(NamedTuple):
    """Which shifts each prefix reads; all fields are ``[b, P]``. docs/spectral.md, "Every prefix in its own scale".

    The Frobenius norm of S_k bounds its largest eigenvalue. Shifts are counted from the largest norm of the response. A
    prefix whose norm is ratio^m times smaller reads its determinants m shifts further down, as if it were scaled up.
    """

    rows: Tensor
    present: Tensor
    """Whether the prefix has a spectrum."""
    offset: Tensor
    """m, the number of shifts above the first one that the prefix reads."""
    trace: Tensor
    """Trace in units of ``scale`` squared; 0 where absent."""
    norm: Tensor
    """Norm in the same units, in (1 / ratio, 1]; 0 where absent."""
    scale: Tensor

    def sums(self, logs: Tensor, nodes: NodeSet) -> Tensor:
        """Spectral sums ``[F, b, P]`` from the log-determinants ``[b, Q, P]``, the response's largest shift first."""
        at = self.offset[:, None] + torch.arange(len(nodes.shifts), device=logs.device)[:, None]
        return torch.where(self.present, nodes.sums(logs.gather(1, at), self.trace, self.norm), 0.0)


def _window(scatter: Scatter, prefixes: Tensor, nodes: NodeSet) -> _Window:
    # 1. The trace and the norm N_k of each prefix.
    last = (prefixes - 1).clamp(min=0)
    trace, norm = scatter.trace.gather(1, last), scatter.norm.gather(1, last)
    present = (prefixes >= 2) & (trace >= SMALLEST_TRACE)
    # 2. N_k on a grid of powers of the ratio, rounded up. The grid is anchored at the response's first trace, so where
    #    a prefix falls between two shifts does not depend on the rows after it.
    anchor = torch.where(scatter.trace >= SMALLEST_TRACE, scatter.trace, torch.inf).amin(1, keepdim=True)
    step = torch.where(present, (norm / anchor).log() / math.log(nodes.ratio), 0.0).ceil()
    # 3. Shifts between the response's largest norm and this prefix's.
    offset = torch.where(present, step.masked_fill(~present, -torch.inf).amax(1, keepdim=True) - step, 0.0)
    # 4. Trace and norm in the prefix's own scale, the square root of its grid point.
    square = torch.where(present, anchor * nodes.ratio**step, 1.0)
    trace, norm = (torch.where(present, part / square, 0.0) for part in (trace, norm))
    return _Window(prefixes, present, offset.long(), trace, norm.clamp(max=1), square.sqrt())


def _prefix_logs(scatter: Scatter, window: _Window, nodes: NodeSet, workspace_bytes: int) -> tuple[Tensor, Tensor]:
    """Log-determinants of each prefix (eq. 2) at all shifts, ``[b, Q, P]``, and failures ``[b]``.

    A shift beyond those of the fit serves only prefixes with an offset, so only their rows are factored. A response has
    failed if a pivot within the rows that a shift serves was not positive.
    """
    batch, count = window.rows.shape
    # 1. The rows that each shift has to cover.
    serves = _rows_served(window, len(nodes.shifts))
    needed = serves.amax(0).tolist()
    # 2. The shifts of each response, in its own units: the largest is t_0 times the square of its largest scale.
    square = torch.where(window.present, window.scale.square(), 0.0).amax(1, keepdim=True)
    first = torch.where(square > 0, square, 1.0) * float(nodes.shifts[0])
    shifts = first * nodes.ratio ** -torch.arange(len(needed), dtype=first.dtype, device=first.device)
    # 3. As many shifts at a time as the workspace holds.
    per_shift = elements_per_shift(math.prod(scatter.blocks.shape[1:3]), scatter.blocks.shape[3])
    group = max(1, min(len(needed), workspace_bytes // (8 * batch * per_shift)))
    size = scatter.blocks.shape[2]
    workspace = first.new_empty(batch * group * scatter.blocks.shape[1] * size * size)
    logs = first.new_zeros(batch, len(needed), count)
    failed = torch.zeros(batch, dtype=torch.bool, device=first.device)
    low = 0
    while low < len(needed) and needed[low] > 0:
        # 4. Factor a group of shifts. Those that serve far fewer rows than its first are cheaper in their own group.
        high = low + sum(rows > needed[low] // 2 for rows in needed[low : low + group])
        determinants, valid = log_determinants(scatter, shifts[:, low:high], needed[low], workspace)
        # 5. Read the determinants at the last row of each prefix.
        at = (window.rows - 1).clamp(min=0, max=needed[low] - 1)
        logs[:, low:high] = determinants.gather(2, at[:, None].expand(-1, high - low, -1))
        failed |= (valid < serves[:, low:high]).any(1)
        low = high
    return logs, failed


def _rows_served(window: _Window, count: int) -> Tensor:
    """Rows of the longest prefix of each response that reads shift q: ``[b, Q]``.

    The first ``count`` shifts, those of the fit, serve all prefixes; a later shift q serves those with an offset of at
    least q - count + 1.
    """
    # The longest prefix with exactly each offset, then with at least that offset.
    rows = window.rows * window.present
    longest = rows.new_zeros(len(rows), int(window.offset.max()) + 1)
    longest.scatter_reduce_(1, window.offset, rows, "amax")
    longest = longest.flip(1).cummax(1).values.flip(1)
    shift = torch.arange(count + longest.shape[1] - 1, device=rows.device)
    return longest[:, (shift - count + 1).clamp(min=0)]


def _scatter(states: Tensor) -> Scatter:
    """Gram matrix or block scatters, traces and norms of contrasts ``[b, n, D]``.

    tr S_k and tr S_k^2 = sum_{i,j<=k} K_ij^2 are running sums over the rows of K = Z Z^T, in which nothing cancels.
    """
    batch, count, width = states.shape
    size = block_rows(count, width)
    # One block: everything comes from the Gram matrix of the response.
    if size == count:
        gram = lower_gram(states)
        trace, square = (part.cumsum(1) for part in _moments(gram))
        return Scatter(gram, states[:, None], None, trace, _norm(trace, square))
    # Several blocks, with S the scatter of the contrasts before each.
    number = math.ceil(count / size)
    blocks = torch.nn.functional.pad(states, (0, 0, 0, number * size - count)).view(batch, number, size, width)
    products = blocks.mT @ blocks
    # An exclusive sum: subtracting from the inclusive one would lose small blocks before a large one.
    before = torch.cat([torch.zeros_like(products[:, :1]), products[:, :-1].cumsum(1)], dim=1)
    # Row z_i of a block adds 2 z_i^T S z_i to tr S_k^2 besides what its own block adds.
    trace, square = _moments(blocks @ blocks.mT)
    square = square + 2 * ((blocks @ before) * blocks).sum(-1)
    trace, square = (part.flatten(1)[:, :count].cumsum(1) for part in (trace, square))
    return Scatter(None, blocks, before, trace, _norm(trace, square))


def _moments(gram: Tensor) -> tuple[Tensor, Tensor]:
    """What row i adds to tr S and to tr S^2 within its block: K_ii, and K_ii^2 + 2 sum_{j<i} K_ij^2; ``gram`` is K."""
    diagonal = gram.diagonal(dim1=-2, dim2=-1)
    return diagonal, 2 * gram.tril().square().sum(-1) - diagonal.square()


def _norm(trace: Tensor, square: Tensor) -> Tensor:
    """sqrt(tr S^2), or, where that underflows, the trace, which bounds the largest eigenvalue as well."""
    return torch.where(square > SMALLEST_TRACE, square.clamp(min=0).sqrt(), trace)


def lower_gram(rows: Tensor, tile: int = 128) -> Tensor:
    """``rows @ rows.mT``, ``[b, n, n]``, valid in the lower triangle; tiles above the diagonal stay 0."""
    gram = rows.new_zeros(rows.shape[0], rows.shape[1], rows.shape[1])
    for start in range(0, rows.shape[1], tile):
        stop = min(start + tile, rows.shape[1])
        gram[:, start:stop, :stop] = rows[:, start:stop] @ rows[:, :stop].mT
    return gram


def log_determinants(scatter: Scatter, shifts: Tensor, rows: int, workspace: Tensor) -> tuple[Tensor, Tensor]:
    """log det(I + S_k / t) for k = 1..rows of every response and shift (eq. 2).

    ``shifts [b, g]`` are positive; ``workspace`` is float64 memory for the factors of all blocks and shifts.

    Returns:
        float64 ``[b, g, rows]``, and ``[b, g]``, the number of valid rows: those before the first pivot that is not
        positive. Such pivots occur at shifts below the rounding error of the Gram matrix.
    """
    if scatter.gram is not None:
        logs, valid = log_pivots(scatter.gram[:, :rows, :rows], 1 / shifts, workspace)
    else:
        logs, valid = _block_log_pivots(scatter, shifts, rows, workspace)
    return logs.cumsum(-1), valid


def _block_log_pivots(scatter: Scatter, shifts: Tensor, rows: int, workspace: Tensor) -> tuple[Tensor, Tensor]:
    """As :func:`log_pivots` of the whole matrix, block by block (eq. 3).

    With S the scatter of the rows before a block Z_b, the Schur complement of the block in I + Z Z^T / t is
    I + Z_b (S + t I)^{-1} Z_b^T, a sum of positive terms, so nothing cancels.
    """
    assert scatter.before is not None
    batch, group = shifts.shape
    size = scatter.blocks.shape[2]
    count = math.ceil(rows / size)
    blocks, before = scatter.blocks[:, :count], scatter.before[:, :count]
    # 1. Factor S + t I = M M^T.
    system = before[:, None].repeat(1, group, 1, 1, 1)
    system.diagonal(dim1=3, dim2=4).add_(shifts[:, :, None, None])
    lower, info = torch.linalg.cholesky_ex(system)
    # 2. Z_b (S + t I)^{-1} Z_b^T is the Gram matrix of M^{-1} Z_b^T.
    inner = torch.linalg.solve_triangular(lower, blocks.mT[:, None].expand(-1, group, -1, -1, -1), upper=False)
    gram = (inner.mT @ inner).view(-1, size, size)
    # 3. The pivots of the Schur complement are those of the block's rows in the whole.
    logs, valid = log_pivots(gram, gram.new_ones(len(gram), 1), workspace)
    # 4. Rows before the first failure of any block.
    valid = torch.where(info > 0, 0, valid.view(batch, group, count))
    first_row = size * torch.arange(count, device=valid.device)
    return (
        logs.reshape(batch, group, count * size)[..., :rows],
        torch.where(valid < size, first_row + valid, rows).amin(2),
    )
