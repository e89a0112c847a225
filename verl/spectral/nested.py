"""Computes spectral sums of every prefix of every response, using one factorisation per shift.

The Helmert contrasts z_k = sqrt((k - 1) / k) (x_k - mean of x_1..x_(k-1)) of a response's rows make centring nested:
the scatter matrix of the first k rows, centred on their own mean, is S_k = sum_{i<=k} z_i z_i^T. Let L be the Cholesky
factor of I + Z Z^T / t, where the rows of Z are all contrasts. Each leading block of L is the Cholesky factor of that
matrix's leading block, so

    log det(I + S_k / t) = sum_{i<=k} 2 log L_ii        for every k at once,

and weighted sums over shifts t give any sum over the eigenvalues of S_k (:mod:`verl.spectral.nodes`). If a response is
long compared with D, its rows are factored in blocks. The rows before each block are folded into a D x D matrix, so the
cost is linear in n. See docs/spectral.md for the derivation, the error analysis and the equations cited below.

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
"""Smallest usable trace for rows whose largest entry is about 1, well above float64's underflow threshold."""


class Scatter(NamedTuple):
    """Quantities that are computed once for all shifts."""

    size: int
    """Number of rows per block. A single block contains all rows."""
    gram: Tensor | None
    """Lower triangle of K = Z Z^T, ``[b, n, n]``, or None if there are several blocks."""
    trace: Tensor
    """Traces tr S_k for k = 1..n, ``[b, n]``."""
    norm: Tensor
    """Frobenius norms sqrt(tr S_k^2), or traces where these underflow, ``[b, n]``. Both bound S_k's eigenvalues."""
    lost: Tensor
    """Whether squares of contrasts have underflowed (see :func:`lost_to_underflow`), ``[b]``."""


class Blocks(NamedTuple):
    """Consecutive blocks of the responses in a chunk."""

    start: int
    """Number of rows before the first block."""
    rows: Tensor
    """Contrasts ``[b, c, s, D]``, zero past the end of a response."""
    before: Tensor
    """Scatter matrix of the rows before each block, ``[b, c, D, D]``."""


class Sums(NamedTuple):
    """Sums over the singular values of each prefix, computed at a scale chosen for that prefix."""

    sums: Tensor
    """Sums over singular values divided by ``scale``, or 0 for prefixes without singular values, ``[F, b, P]``."""
    scale: Tensor
    """Scales ``[b, P]``, which are 1 for prefixes without singular values."""
    failed: Tensor
    """Whether sums are invalid because of a nonpositive pivot or an underflow of squares, ``[b]``."""


def nested_sums(chunk: Chunk, prefixes: Tensor, nodes: NodeSet, workspace_bytes: int, max_bytes: int) -> Sums:
    """Return sums of the fitted functions over the spectrum of each prefix (eq. 5).

    Args:
        chunk: Chunk of b responses with n rows.
        prefixes: Row counts k ``[b, P]`` of the prefixes on the CPU, at most the response's length; P is at least 1.
        nodes: Fit of F functions.
        workspace_bytes: Bound on matrices for several responses, blocks or shifts at once. The matrices for one shift
            of one block may exceed it.
        max_bytes: Bound on the matrices for one response (see :func:`verl.spectral.bounds.block_rows`), at least
            ``workspace_bytes``.
    """
    # 1. Compute the Gram matrix, traces and norms, which all shifts share.
    scatter = _scatter(chunk, block_rows(chunk.longest, chunk.width, max_bytes), workspace_bytes)
    # 2. Compute the scale of each prefix, and the first shift that it uses.
    window = _window(scatter, to_device(prefixes, chunk.hidden.device), nodes)
    # 3. Compute the log-determinants of every prefix at every shift (eq. 2). The Gram matrix stays in memory.
    if scatter.gram is not None:
        workspace_bytes = min(workspace_bytes, max_bytes - scatter.gram.nbytes)
    logs, failed = _prefix_logs(chunk, scatter, window, prefixes, nodes, workspace_bytes)
    # 4. Compute the weighted sum over the shifts that each prefix uses (eq. 5).
    return Sums(window.sums(logs, nodes), window.scale, failed | scatter.lost)


def lost_to_underflow(chunk: Chunk) -> Tensor:
    """Return whether any prefix of each response has nonzero contrasts whose squares underflow, ``[b]`` bool."""
    present, energy = [], []
    for block in chunk.contrasts():
        present.append(_present(block))
        energy.append(block.square_().sum(2))
    return _lost(torch.cat(present, dim=1), torch.cat(energy, dim=1).cumsum(1))


def _present(rows: Tensor) -> Tensor:
    """Return a mask of the rows with nonzero entries, ``[..., D] -> [...]``."""
    return (rows.amin(-1) < 0) | (rows.amax(-1) > 0)


def _lost(present: Tensor, trace: Tensor) -> Tensor:
    return (present & (trace < SMALLEST_TRACE)).any(1)


class _Window(NamedTuple):
    """Range of shifts used by each prefix (docs/spectral.md, "Every prefix in its own scale"). Fields are ``[b, P]``.

    The Frobenius norm of S_k bounds its largest eigenvalue. The prefix with the largest norm in a response uses the
    first shifts. A prefix whose norm is smaller by a factor of ratio^m starts m shifts later, as if it were scaled up.
    """

    rows: Tensor
    present: Tensor
    """Whether the prefix has a nonempty spectrum."""
    offset: Tensor
    """Offset m: index of the first shift that the prefix uses."""
    trace: Tensor
    """Trace in units of ``scale`` squared, or 0 if the prefix has no spectrum."""
    norm: Tensor
    """Norm in units of ``scale`` squared, within (1 / ratio, 1], or 0 if the prefix has no spectrum."""
    scale: Tensor

    def sums(self, logs: Tensor, nodes: NodeSet) -> Tensor:
        """Compute spectral sums ``[F, b, P]`` from log-determinants ``[b, Q, P]``, ordered from the largest shift."""
        at = self.offset[:, None] + torch.arange(len(nodes.shifts), device=logs.device)[:, None]
        return torch.where(self.present, nodes.sums(logs.gather(1, at), self.trace, self.norm), 0.0)


def _window(scatter: Scatter, prefixes: Tensor, nodes: NodeSet) -> _Window:
    # 1. Look up the trace and the norm N_k of each prefix.
    last = (prefixes - 1).clamp(min=0)
    trace, norm = scatter.trace.gather(1, last), scatter.norm.gather(1, last)
    present = (prefixes >= 2) & (trace >= SMALLEST_TRACE)
    # 2. Round N_k up to a grid of powers of the ratio. The grid is anchored at the response's first trace, so that a
    #    prefix's position between two shifts does not depend on later rows.
    anchor = torch.where(scatter.trace >= SMALLEST_TRACE, scatter.trace, torch.inf).amin(1, keepdim=True)
    step = torch.where(present, (norm / anchor).log() / math.log(nodes.ratio), 0.0).ceil()
    # 3. Count the shifts between the response's largest norm and the prefix's norm.
    offset = torch.where(present, step.masked_fill(~present, -torch.inf).amax(1, keepdim=True) - step, 0.0)
    # 4. Convert trace and norm to the prefix's own scale, the square root of its grid point.
    square = torch.where(present, anchor * nodes.ratio**step, 1.0)
    trace, norm = (torch.where(present, part / square, 0.0) for part in (trace, norm))
    return _Window(prefixes, present, offset.long(), trace, norm.clamp(max=1), square.sqrt())


def _prefix_logs(
    chunk: Chunk, scatter: Scatter, window: _Window, prefixes: Tensor, nodes: NodeSet, workspace_bytes: int
) -> tuple[Tensor, Tensor]:
    """Return log-determinants ``[b, Q, P]`` of prefixes at all shifts (eq. 2), and a mask ``[b]`` of failed responses.

    Shifts beyond those of the fit are used only by prefixes with an offset, so no other rows are factored there. A
    response fails if a pivot in the rows needed at a shift is not positive.
    """
    # 1. Determine the rows that each shift has to cover.
    offset, present = torch.stack([window.offset, window.present.long()]).cpu()
    serves = _rows_served(prefixes * present, offset, len(nodes.shifts))
    needed = serves.amax(0).tolist()
    # 2. Scale the shifts to each response: the largest is t_0 times the square of its largest scale.
    square = torch.where(window.present, window.scale.square(), 0.0).amax(1, keepdim=True)
    first = torch.where(square > 0, square, 1.0) * float(nodes.shifts[0])
    shifts = first * nodes.ratio ** -torch.arange(len(needed), dtype=first.dtype, device=first.device)
    # 3. Compute the logarithms of all pivots, and the rows before the first nonpositive one.
    if scatter.gram is not None:
        pivots, valid = _gram_pivots(scatter.gram, shifts, needed, workspace_bytes)
    else:
        pivots, valid = _block_pivots(chunk, scatter.size, shifts, needed, workspace_bytes)
    # 4. Read the determinants at the last row of each prefix.
    at = (window.rows - 1).clamp(min=0)
    logs = pivots.cumsum_(-1).gather(2, at[:, None].expand(-1, len(needed), -1))
    return logs, (valid < to_device(serves, valid.device)).any(1)


def _rows_served(rows: Tensor, offset: Tensor, count: int) -> Tensor:
    """Return the row count of each response's longest prefix that uses shift q, ``[b, Q]``.

    ``rows [b, P]`` are the row counts of the prefixes (0 without a spectrum), and ``offset`` is as in :class:`_Window`.
    Both are on the CPU. If the fit has ``count`` shifts, shift q is used by prefixes with an offset of at least q -
    count + 1.
    """
    # For each offset, find the longest prefix with exactly that offset, and then with at least that offset.
    longest = rows.new_zeros(len(rows), int(offset.max()) + 1)
    longest.scatter_reduce_(1, offset, rows, "amax")
    longest = longest.flip(1).cummax(1).values.flip(1)
    shift = torch.arange(count + longest.shape[1] - 1, device=rows.device)
    return longest[:, (shift - count + 1).clamp(min=0)]


def _scatter(chunk: Chunk, size: int, workspace_bytes: int) -> Scatter:
    """Compute the Gram matrix, traces and norms of a chunk's contrasts, in blocks of ``size`` rows.

    tr S_k and tr S_k^2 = sum_{i,j<=k} K_ij^2 are cumulative sums of nonnegative terms over the rows of K = Z Z^T.
    """
    # With a single block, derive everything from the Gram matrix of the response.
    if size == chunk.longest:
        rows = chunk.all_contrasts()
        gram = lower_gram(rows)
        trace, square = (part.cumsum(1) for part in _moments(gram))
        return Scatter(size, gram, trace, _norm(trace, square), _lost(_present(rows), trace))
    # With several blocks, let S be the scatter matrix of the contrasts before each block.
    presents, traces, squares = [], [], []
    for part in _blocks(chunk, size, workspace_bytes):
        rows, before = part.rows.flatten(0, 1), part.before.flatten(0, 1)
        gram = lower_gram(rows)
        trace, square = _moments(gram)
        del gram
        # Row z_i of a block adds 2 z_i^T S z_i to tr S_k^2, in addition to the terms within its block.
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
    """Yield a chunk's blocks of ``size`` rows, as many at a time as fit into the workspace."""
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
            # Use an exclusive sum: subtracting from an inclusive one would lose small blocks before a large one.
            sums = (blocks[:, :-1].mT @ blocks[:, :-1]).cumsum(1).add_(before)
            before = torch.cat([before, sums], dim=1)
        yield Blocks(start, blocks, before)
        # Add the last block to the scatter matrix for later blocks, in place since ``before`` was already used.
        if start + rows.shape[1] < chunk.longest:
            total = before[:, -1]
            last = blocks[:, -1]
            add_product(total, last.mT, last)


def _moments(gram: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's contributions to tr S and tr S^2, where K = ``gram``: K_ii and K_ii^2 + 2 sum_{j<i} K_ij^2."""
    diagonal = gram.diagonal(dim1=-2, dim2=-1)
    squares = [
        gram[:, start : start + BLOCK_ROWS].tril(start).square_().sum(-1)
        for start in range(0, gram.shape[1], BLOCK_ROWS)
    ]
    return diagonal, 2 * torch.cat(squares, dim=1) - diagonal.square()


def _norm(trace: Tensor, square: Tensor) -> Tensor:
    """Return sqrt(tr S^2) or, if it underflows, the trace, which also bounds the largest eigenvalue."""
    return torch.where(square > SMALLEST_TRACE, square.clamp(min=0).sqrt(), trace)


def lower_gram(rows: Tensor) -> Tensor:
    """Return ``rows @ rows.mT``, ``[b, n, n]``. Only the lower triangle of the result is valid."""
    gram = rows.new_zeros(rows.shape[0], rows.shape[1], rows.shape[1])
    add_product(gram, rows, rows.mT, lower=True)
    return gram


def _gram_pivots(gram: Tensor, shifts: Tensor, needed: list[int], workspace_bytes: int) -> tuple[Tensor, Tensor]:
    """Return ``2 log L_ii`` for I + K / t at shifts t of shape ``[b, Q]``, and the number of valid rows at each shift.

    The logarithms ``[b, Q, n]`` are 0 past the ``needed`` rows. The counts ``[b, Q]`` are the rows before the first
    nonpositive pivot. Nonpositive pivots occur at shifts below the rounding error of K = ``gram``, ``[b, n, n]``.
    """
    batch, size = gram.shape[:2]
    pivots = gram.new_zeros(batch, len(needed), size)
    valid = torch.full(shifts.shape, size, device=gram.device)
    served = sum(rows > 0 for rows in needed)
    if not served:
        return pivots, valid
    # 1. Decompose the first columns, which all shifts share.
    columns, head = head_columns(needed[0], device_kind(gram.device)), None
    if columns:
        head = decompose_head(gram, columns)
        workspace_bytes -= head.below.nbytes
    # 2. Process as many shifts at a time as fit into the workspace, in groups of similar size.
    largest = max(columns, needed[0] - columns)
    group = max(1, min(served, workspace_bytes // (8 * batch * shift_elements(largest))))
    group = math.ceil(served / math.ceil(served / group))
    workspace = gram.new_empty(batch * group * largest * (largest + PADDING))
    low = 0
    while low < served:
        # Shifts that need far fewer rows than the first shift in their group are cheaper in a separate group.
        high = low + sum(rows > needed[low] // 2 for rows in needed[low : low + group])
        part = gram[:, : needed[low], : needed[low]]
        found = log_pivots(part, 1 / shifts[:, low:high], workspace, head)
        pivots[:, low:high, : needed[low]], valid[:, low:high] = found
        low = high
    return pivots, valid


def _block_pivots(
    chunk: Chunk, size: int, shifts: Tensor, needed: list[int], workspace_bytes: int
) -> tuple[Tensor, Tensor]:
    """Compute the results of :func:`_gram_pivots` for responses with several blocks (eq. 3).

    If S is the scatter matrix of the rows before a block Z_b, the block's Schur complement in I + Z Z^T / t is
    I + Z_b (S + t I)^{-1} Z_b^T. This sum of positive terms avoids cancellation.
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
    """Return ``2 log L_ii`` of blocks, shape ``[b, g, c s]``, and valid row counts, shaped like ``shifts [b, g]``."""
    blocks, before = part.rows, part.before
    batch, count, rows, width = blocks.shape
    group = shifts.shape[1]
    number = batch * group * count

    def panel(start: int, stop: int) -> Tensor:
        """Return columns of the matrix S + t I stacked on top of Z_b."""
        shape = (batch, group, count, -1, stop - start)
        system = before[:, None, :, start:, start:stop].expand(*shape[:3], width - start, -1)
        block = torch.cat([system, blocks[:, None, :, :, start:stop].expand(*shape[:3], rows, -1)], dim=3)
        block.diagonal(dim1=3, dim2=4).add_(shifts[:, :, None, None])
        return block.view(number, -1, stop - start)

    # 1. Factor S + t I = M M^T, which also computes the rows below, Z_b M^{-T}.
    lower = blocks.new_empty(number, width + rows, width + PADDING)[:, :, :width]
    _, solved = factor_columns(panel, lower)
    # 2. Z_b (S + t I)^{-1} Z_b^T is the Gram matrix of Z_b M^{-T}.
    gram = lower_gram(lower[:, width:])
    # 3. The pivots of the Schur complement equal the full matrix's pivots in the block's rows.
    workspace = gram.new_empty(number * rows * (rows + PADDING))
    logs, good = log_pivots(gram, gram.new_ones(number, 1), workspace)
    # 4. Count the rows before the first failure in any block.
    good = torch.where(solved < width, 0, good[:, 0]).view(batch, group, count)
    first_row = rows * torch.arange(count, device=good.device)
    return logs.reshape(batch, group, count * rows), torch.where(good < rows, first_row + good, count * rows).amin(2)
