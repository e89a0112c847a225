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
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from verl.spectral.bounds import BLOCK_ROWS, PADDING, block_elements, block_rows, shift_elements
from verl.spectral.factor import add_product, decompose_head, device_kind, factor_columns, head_columns, log_pivots
from verl.spectral.nodes import NodeSet
from verl.spectral.responses import Chunk
from verl.utils.device import to_device

SMALLEST_TRACE = 1e-270
"""Traces below this are too near the end of float64's range; the largest entry of the rows is about 1."""


class Scatter(NamedTuple):
    """What does not depend on the shift."""

    size: int
    """Rows of a block; all rows where the response is one block."""
    gram: Tensor | None
    """Lower triangle of K = Z Z^T, ``[b, n, n]``, where the response is one block."""
    trace: Tensor
    """tr S_k for k = 1..n: ``[b, n]``."""
    norm: Tensor
    """Frobenius norm sqrt(tr S_k^2), or a larger bound on the largest eigenvalue of S_k: ``[b, n]``."""
    lost: Tensor
    """``[b]``: as :func:`lost_to_underflow`."""


class Blocks(NamedTuple):
    """Some neighbouring blocks of a response."""

    start: int
    """Rows before the first."""
    rows: Tensor
    """Contrasts ``[b, c, s, D]``, zero past the end."""
    before: Tensor
    """Scatter of the rows before each block ``[b, c, D, D]``."""


class Sums(NamedTuple):
    """Sums over the singular values of each prefix, each prefix in its own scale."""

    sums: Tensor
    """``[F, b, P]``, over the singular values divided by ``scale``; 0 for prefixes without any."""
    scale: Tensor
    """``[b, P]``, 1 for prefixes without singular values."""
    failed: Tensor
    """``[b]``: a pivot was not positive, or a prefix is too small beside the rows after it. The sums are invalid."""


def nested_sums(chunk: Chunk, prefixes: Tensor, nodes: NodeSet, workspace_bytes: int, max_bytes: int) -> Sums:
    """Return sums of the fitted functions over the spectrum of each prefix (eq. 5).

    Args:
        chunk: b responses of n rows.
        prefixes: ``[b, P]`` on the CPU, rows k of each prefix, at most the response's length; P is at least 1.
        nodes: the fit of F functions.
        workspace_bytes: bound on the matrices of several responses, blocks or shifts; those of a single one may exceed
            it.
        max_bytes: bound on those of a single one, see :func:`verl.spectral.bounds.block_rows`. At least
            ``workspace_bytes``.
    """
    # 1. The Gram matrix, traces and norms, which all shifts share.
    scatter = _scatter(chunk, block_rows(chunk.longest, chunk.width, max_bytes), workspace_bytes)
    # 2. The scale of each prefix, and from which shift it starts to read.
    window = _window(scatter, to_device(prefixes, chunk.hidden.device), nodes)
    # 3. The log-determinants of every prefix at every shift (eq. 2). The Gram matrix stays beside the factors.
    if scatter.gram is not None:
        workspace_bytes = min(workspace_bytes, max_bytes - scatter.gram.nbytes)
    logs, failed = _prefix_logs(chunk, scatter, window, prefixes, nodes, workspace_bytes)
    # 4. The weighted sum over the shifts that each prefix reads (eq. 5).
    return Sums(window.sums(logs, nodes), window.scale, failed | scatter.lost)


def lost_to_underflow(chunk: Chunk) -> Tensor:
    """Return whether the contrasts of a prefix are not 0, but their squares are (nearly) lost to underflow: ``[b]``."""
    present, energy = [], []
    for block in chunk.contrasts():
        present.append(_present(block))
        energy.append(block.square_().sum(2))
    return _lost(torch.cat(present, dim=1), torch.cat(energy, dim=1).cumsum(1))


def _present(rows: Tensor) -> Tensor:
    """Which of the rows ``[..., D]`` are not 0."""
    return (rows.amin(-1) < 0) | (rows.amax(-1) > 0)


def _lost(present: Tensor, trace: Tensor) -> Tensor:
    return (present & (trace < SMALLEST_TRACE)).any(1)


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


def _prefix_logs(
    chunk: Chunk, scatter: Scatter, window: _Window, prefixes: Tensor, nodes: NodeSet, workspace_bytes: int
) -> tuple[Tensor, Tensor]:
    """Return the log-determinants of each prefix (eq. 2) at all shifts, ``[b, Q, P]``, and failures ``[b]``.

    A shift beyond those of the fit serves only prefixes with an offset, so only their rows are factored. A response has
    failed if a pivot within the rows that a shift serves was not positive.
    """
    # 1. The rows that each shift has to cover.
    offset, present = torch.stack([window.offset, window.present.long()]).cpu()
    serves = _rows_served(prefixes * present, offset, len(nodes.shifts))
    needed = serves.amax(0).tolist()
    # 2. The shifts of each response, in its own units: the largest is t_0 times the square of its largest scale.
    square = torch.where(window.present, window.scale.square(), 0.0).amax(1, keepdim=True)
    first = torch.where(square > 0, square, 1.0) * float(nodes.shifts[0])
    shifts = first * nodes.ratio ** -torch.arange(len(needed), dtype=first.dtype, device=first.device)
    # 3. The logarithms of all pivots, and the rows before the first that was not positive.
    if scatter.gram is not None:
        pivots, valid = _gram_pivots(scatter.gram, shifts, needed, workspace_bytes)
    else:
        pivots, valid = _block_pivots(chunk, scatter.size, shifts, needed, workspace_bytes)
    # 4. The determinants at the last row of each prefix.
    at = (window.rows - 1).clamp(min=0)
    logs = pivots.cumsum_(-1).gather(2, at[:, None].expand(-1, len(needed), -1))
    return logs, (valid < to_device(serves, valid.device)).any(1)


def _rows_served(rows: Tensor, offset: Tensor, count: int) -> Tensor:
    """Return the rows of the longest prefix of each response that reads shift q, ``[b, Q]``.

    ``rows [b, P]`` of the prefixes, 0 of those without a spectrum, and ``offset`` as in :class:`_Window`, on the CPU.
    The first ``count`` shifts, those of the fit, serve all prefixes; a later shift q serves those with an offset of at
    least q - count + 1.
    """
    # The longest prefix with exactly each offset, then with at least that offset.
    longest = rows.new_zeros(len(rows), int(offset.max()) + 1)
    longest.scatter_reduce_(1, offset, rows, "amax")
    longest = longest.flip(1).cummax(1).values.flip(1)
    shift = torch.arange(count + longest.shape[1] - 1, device=rows.device)
    return longest[:, (shift - count + 1).clamp(min=0)]


def _scatter(chunk: Chunk, size: int, workspace_bytes: int) -> Scatter:
    """Compute Gram matrix, traces and norms of the contrasts of a chunk, in blocks of ``size`` rows.

    tr S_k and tr S_k^2 = sum_{i,j<=k} K_ij^2 are running sums over the rows of K = Z Z^T, in which nothing cancels.
    """
    # One block: everything comes from the Gram matrix of the response.
    if size == chunk.longest:
        rows = chunk.all_contrasts()
        gram = lower_gram(rows)
        trace, square = (part.cumsum(1) for part in _moments(gram))
        return Scatter(size, gram, trace, _norm(trace, square), _lost(_present(rows), trace))
    # Several blocks, with S the scatter of the contrasts before each.
    presents, traces, squares = [], [], []
    for part in _blocks(chunk, size, workspace_bytes):
        rows, before = part.rows.flatten(0, 1), part.before.flatten(0, 1)
        gram = lower_gram(rows)
        trace, square = _moments(gram)
        del gram
        # Row z_i of a block adds 2 z_i^T S z_i to tr S_k^2 besides what its own block adds.
        inner = torch.zeros_like(rows)
        add_product(inner, rows, before)
        square = square + 2 * inner.mul_(rows).sum(-1)
        presents.append(_present(rows).reshape(len(chunk), -1))
        traces.append(trace.reshape(len(chunk), -1))
        squares.append(square.reshape(len(chunk), -1))
    present, *moments = (torch.cat(part, dim=1)[:, : chunk.longest] for part in (presents, traces, squares))
    trace, square = (part.cumsum(1) for part in moments)
    return Scatter(size, None, trace, _norm(trace, square), _lost(present, trace))


def _blocks(chunk: Chunk, size: int, workspace_bytes: int) -> Iterator[Blocks]:
    """Yield the blocks of ``size`` rows of a chunk, as many at a time as the workspace holds."""
    batch, width = len(chunk), chunk.width
    at_once = max(1, workspace_bytes // (8 * batch * block_elements(size, width)))
    at_once = min(at_once, math.ceil(chunk.longest / size))
    total = chunk.scale.new_zeros(batch, width, width)
    for index, rows in enumerate(chunk.contrasts(at_once * size)):
        start = index * at_once * size
        count = math.ceil(rows.shape[1] / size)
        if count > 1:
            rows = F.pad(rows, (0, 0, 0, count * size - rows.shape[1]))
        blocks = rows.view(batch, count, -1, width)
        before = total[:, None]
        if count > 1:
            # An exclusive sum: subtracting from the inclusive one would lose small blocks before a large one.
            sums = (blocks[:, :-1].mT @ blocks[:, :-1]).cumsum(1).add_(before)
            before = torch.cat([before, sums], dim=1)
        yield Blocks(start, blocks, before)
        # The last block completes the scatter of those that follow. ``before`` was read already.
        if start + rows.shape[1] < chunk.longest:
            total = before[:, -1]
            last = blocks[:, -1]
            add_product(total, last.mT, last)


def _moments(gram: Tensor) -> tuple[Tensor, Tensor]:
    """Return what row i adds to tr S and tr S^2 in its block: K_ii, K_ii^2 + 2 sum_{j<i} K_ij^2; ``gram`` is K."""
    diagonal = gram.diagonal(dim1=-2, dim2=-1)
    squares = [
        gram[:, start : start + BLOCK_ROWS].tril(start).square_().sum(-1)
        for start in range(0, gram.shape[1], BLOCK_ROWS)
    ]
    return diagonal, 2 * torch.cat(squares, dim=1) - diagonal.square()


def _norm(trace: Tensor, square: Tensor) -> Tensor:
    """Return sqrt(tr S^2), or, if it underflows, the trace, which bounds the largest eigenvalue as well."""
    return torch.where(square > SMALLEST_TRACE, square.clamp(min=0).sqrt(), trace)


def lower_gram(rows: Tensor) -> Tensor:
    """Return ``rows @ rows.mT``, ``[b, n, n]``, valid in the lower triangle; most of the rest is 0."""
    gram = rows.new_zeros(rows.shape[0], rows.shape[1], rows.shape[1])
    add_product(gram, rows, rows.mT, lower=True)
    return gram


def _gram_pivots(gram: Tensor, shifts: Tensor, needed: list[int], workspace_bytes: int) -> tuple[Tensor, Tensor]:
    """Return ``2 log L_ii`` of I + K / t for the ``shifts [b, Q]``, each for its ``needed`` rows, and the valid rows.

    ``gram [b, n, n]`` is K -> ``[b, Q, n]``, 0 past the needed rows, and ``[b, Q]``, rows before the first pivot that
    is not positive. Such pivots occur at shifts below the rounding error of the Gram matrix.
    """
    batch, size = gram.shape[:2]
    pivots = gram.new_zeros(batch, len(needed), size)
    valid = torch.full(shifts.shape, size, device=gram.device)
    served = sum(rows > 0 for rows in needed)
    if not served:
        return pivots, valid
    # 1. What all shifts share of the first columns.
    columns, head = head_columns(needed[0], device_kind(gram.device)), None
    if columns:
        head = decompose_head(gram, columns)
        workspace_bytes -= head.below.nbytes
    # 2. As many shifts at a time as the workspace holds, in groups of about one size.
    largest = max(columns, needed[0] - columns)
    group = max(1, min(served, workspace_bytes // (8 * batch * shift_elements(largest))))
    group = math.ceil(served / math.ceil(served / group))
    workspace = gram.new_empty(batch * group * largest * (largest + PADDING))
    low = 0
    while low < served:
        # Shifts that serve far fewer rows than the first of their group are cheaper in their own.
        high = low + sum(rows > needed[low] // 2 for rows in needed[low : low + group])
        part = gram[:, : needed[low], : needed[low]]
        found = log_pivots(part, 1 / shifts[:, low:high], workspace, head)
        pivots[:, low:high, : needed[low]], valid[:, low:high] = found
        low = high
    return pivots, valid


def _block_pivots(
    chunk: Chunk, size: int, shifts: Tensor, needed: list[int], workspace_bytes: int
) -> tuple[Tensor, Tensor]:
    """Return what :func:`_gram_pivots` returns, for a response in blocks (eq. 3).

    With S the scatter of the rows before a block Z_b, the Schur complement of the block in I + Z Z^T / t is
    I + Z_b (S + t I)^{-1} Z_b^T, a sum of positive terms, so nothing cancels.
    """
    batch, width = len(chunk), chunk.width
    pivots = chunk.scale.new_zeros(batch, len(needed), chunk.longest)
    valid = torch.full(shifts.shape, chunk.longest, device=shifts.device)
    for part in _blocks(chunk, size, workspace_bytes):
        count, rows = part.rows.shape[1:3]
        stop = min(part.start + count * rows, chunk.longest)
        served = sum(row > part.start for row in needed)
        per_shift = 8 * batch * count * block_elements(size, width)
        group = max(1, min(served, workspace_bytes // per_shift))
        for low in range(0, served, group):
            high = min(low + group, served)
            logs, good = _schur_pivots(part, shifts[:, low:high])
            pivots[:, low:high, part.start : stop] = logs[..., : stop - part.start]
            good = torch.where(good < count * rows, part.start + good, chunk.longest)
            valid[:, low:high] = torch.minimum(valid[:, low:high], good)
    return pivots, valid


def _schur_pivots(part: Blocks, shifts: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``2 log L_ii`` of the rows of blocks for ``shifts [b, g]``, ``[b, g, c s]``, and valid rows ``[b, g]``."""
    blocks, before = part.rows, part.before
    batch, count, rows, width = blocks.shape
    group = shifts.shape[1]
    number = batch * group * count

    def panel(start: int, stop: int) -> Tensor:
        """Columns of S + t I, and of Z_b below it."""
        shape = (batch, group, count, -1, stop - start)
        system = before[:, None, :, start:, start:stop].expand(*shape[:3], width - start, -1)
        block = torch.cat([system, blocks[:, None, :, :, start:stop].expand(*shape[:3], rows, -1)], dim=3)
        block.diagonal(dim1=3, dim2=4).add_(shifts[:, :, None, None])
        return block.view(number, -1, stop - start)

    # 1. Factor S + t I = M M^T, and with it compute Z_b M^{-T}, the rows below.
    lower = blocks.new_empty(number, width + rows, width + PADDING)[:, :, :width]
    _, solved = factor_columns(panel, lower)
    # 2. Z_b (S + t I)^{-1} Z_b^T is the Gram matrix of Z_b M^{-T}.
    gram = lower_gram(lower[:, width:])
    # 3. The pivots of the Schur complement are those of the block's rows in the whole.
    workspace = gram.new_empty(number * rows * (rows + PADDING))
    logs, good = log_pivots(gram, gram.new_ones(number, 1), workspace)
    # 4. Rows before the first failure of any block.
    good = torch.where(solved < width, 0, good[:, 0]).view(batch, group, count)
    first_row = rows * torch.arange(count, device=good.device)
    return logs.reshape(batch, group, count * rows), torch.where(good < rows, first_row + good, count * rows).amin(2)
