"""Spectral sums of every prefix of every response from one factorisation per shift.

X [n, D] are a response's rows minus one of its own rows, K = X X^T, and S_k the scatter matrix of the first k rows
centred on their own mean. With L L^T = I + K / t the leading blocks of L are the factors of the leading blocks, so

    log det(I + K_k / t)          = sum_{i<=k} 2 log L_ii
    1^T (I + K_k / t)^{-1} 1      = sum_{i<=k} y_i^2,                 y = L^{-1} 1
    log det(I + S_k / t)          = the first + log(the second / k)   (matrix determinant lemma)

and a weighted sum over shifts gives any sum over the eigenvalues of S_k (:mod:`verl.spectral.nodes`). When a
response is long compared with D, blocks of rows are factored one by one with what came before folded into a D x D
matrix; the cost is then linear in n. Derivation and error analysis: docs/spectral.md.

Shapes: b responses, n rows (padded with zero rows), D hidden size, g shifts, F functions.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from verl.spectral.factor import factor
from verl.spectral.nodes import Ladder, NodeSet


class Scatter(NamedTuple):
    """What the shifts share."""

    gram: Tensor | None
    """Lower triangle of K ``[b, n, n]`` when the whole response is one block."""
    blocks: Tensor
    """Rows in blocks ``[b, blocks, s, D]``, zero past the end."""
    trace: Tensor
    """tr S_k for k = 1..n: ``[b, n]``."""

    def select(self, index: Tensor) -> "Scatter":
        """These responses alone."""
        if len(index) == len(self.trace):
            return self
        gram = None if self.gram is None else self.gram[index]
        return Scatter(gram, self.blocks[index], self.trace[index])


def block_rows(rows: int, width: int) -> int:
    """Rows per block that minimise the operations of one shift: all of them, or D for long responses."""
    return min((rows, min(rows, max(width, 1))), key=lambda size: factor_operations(rows, width, size))


def factor_operations(rows: int, width: int, size: int) -> float:
    """Floating-point operations of one shift for one response in blocks of ``size`` rows."""
    blocks = math.ceil(rows / size)
    if blocks == 1:
        return rows**3 / 3
    per_block = width**3 / 3 + width**2 * size + 2 * width * size**2 + size**3 / 3
    return blocks * per_block


def nested_sums(rows: Tensor, prefixes: Tensor, ladder: Ladder, workspace_bytes: int) -> tuple[Tensor, Tensor]:
    """Sums of the fitted functions over the spectrum of each prefix, each prefix in a scale of its own.

    Args:
        rows: float64 ``[b, n, D]``, one of the response's own first rows subtracted, zeros past its end.
        prefixes: ``[b, P]`` rows k of each prefix, at most the response's length; P is at least 1.
        ladder: the fits, of F functions.
        workspace_bytes: bound on the memory for matrices; one matrix may exceed it.

    Returns:
        ``(sums [F, b, P], scale [b, P])``: the sums are over the singular values of the centred prefix divided by
        ``scale``. A prefix of fewer than 2 rows or of equal rows has no singular values: sums 0, scale 1.

    Raises:
        FloatingPointError: a pivot was not positive at the first range tried, which rounding alone cannot do.
    """
    scatter = prepare(rows)
    window = _window(scatter.trace, prefixes, ladder.ratio)
    rung = ladder.rungs[0]
    logs, failed = _prefix_logs(scatter, window, ladder, 0, len(rung.shifts), workspace_bytes)
    if bool(failed.any()):
        raise FloatingPointError("nested: a pivot is not positive; the Gram matrix of the states is not semidefinite")
    sums = window.sums(logs, rung)
    for check, longer in zip(ladder.checks, ladder.rungs[1:], strict=True):
        change = (sums - window.sums(logs, check)).abs() / ladder.plain(sums)
        wider = (change > 2 * ladder.tolerance).any(2).any(0).nonzero()[:, 0]
        if not len(wider):
            break
        part, start = window.select(wider), len(rung.shifts)
        more, failed = _prefix_logs(scatter.select(wider), part, ladder, start, len(longer.shifts), workspace_bytes)
        wider_sums = part.sums(torch.cat([logs[wider, :start], more], dim=1), longer)
        # A shift below the rounding of the Gram matrix has no factor: that response keeps the sums it has.
        sums[:, wider] = torch.where(failed[:, None], sums[:, wider], wider_sums)
    return sums, window.scale


class _Window(NamedTuple):
    """Where each prefix reads the shifts: all ``[b, P]``.

    The trace bounds the largest eigenvalue. A prefix whose trace is ratio^m times smaller than the response's largest
    reads its determinants m shifts further down, as if it had been scaled up.
    """

    rows: Tensor
    present: Tensor
    """Whether the prefix has a spectrum."""
    offset: Tensor
    """The m above."""
    trace: Tensor
    """Trace in units of the square of ``scale``: in (1 / ratio, 1], or 0 where absent."""
    scale: Tensor

    def select(self, index: Tensor) -> "_Window":
        return _Window(*(part[index] for part in self))

    def sums(self, logs: Tensor, nodes: NodeSet) -> Tensor:
        """Sums ``[F, b, P]`` from the determinants ``[b, Q, P]`` of shifts counted from the response's largest."""
        at = self.offset[:, None] + torch.arange(len(nodes.shifts), device=logs.device)[:, None]
        return torch.where(self.present, nodes.sums(logs.gather(1, at), self.trace), 0.0)


def _window(trace: Tensor, prefixes: Tensor, ratio: float) -> _Window:
    trace = trace.gather(1, (prefixes - 1).clamp(min=0))
    present = (prefixes >= 2) & (trace > 0)
    trace = torch.where(present, trace, 0.0)
    largest = trace.amax(1, keepdim=True)
    offset = (torch.where(present, largest / trace, 1.0).log() / math.log(ratio)).floor()
    square = torch.where(present, largest * ratio**-offset, 1.0)
    return _Window(prefixes, present, offset.long(), trace / square, square.sqrt())


def _prefix_logs(
    scatter: Scatter, window: _Window, ladder: Ladder, start: int, stop: int, workspace_bytes: int
) -> tuple[Tensor, Tensor]:
    """Determinants of the shifts ``start`` to ``stop`` of every prefix's window: ``[b, Q, P]``, and failures ``[b]``.

    A shift past ``stop`` serves only prefixes with an offset, so only their rows are factored. A response has failed if
    a pivot within the rows that a shift serves was not positive.
    """
    batch, count = window.rows.shape
    serves = _rows_served(window, start, stop)
    needed = serves.amax(0).tolist()
    # The largest shift of a response is t_0 times the square of its largest prefix's scale.
    square = (window.scale.square() * window.present).amax(1, keepdim=True)
    first = torch.where(square > 0, square, 1.0) * float(ladder.rungs[0].shifts[0])
    shifts = first * ladder.ratio ** -torch.arange(start, start + len(needed), dtype=first.dtype, device=first.device)
    group = max(1, workspace_bytes // (8 * batch * numel_per_shift(scatter)))
    workspace = first.new_empty(batch * min(group, len(needed)) * numel_per_shift(scatter))
    logs = first.new_zeros(batch, len(needed), count)
    failed = torch.zeros(batch, dtype=torch.bool, device=first.device)
    for low in range(0, len(needed), group):
        high = min(low + group, len(needed))
        if needed[low] == 0:
            break
        determinants, valid = log_determinants(scatter, shifts[:, low:high], needed[low], workspace)
        at = (window.rows - 1).clamp(min=0, max=needed[low] - 1)
        logs[:, low:high] = determinants.gather(2, at[:, None].expand(-1, high - low, -1))
        failed |= (valid < serves[:, low:high]).any(1)
    return logs, failed


def _rows_served(window: _Window, start: int, stop: int) -> Tensor:
    """Rows of the longest prefix of each response that reads shift q, ``[b, Q]`` for q = start, start + 1, ...

    Shifts below ``stop`` serve all prefixes, shift q above those with an offset of at least q - stop + 1.
    """
    rows = window.rows * window.present
    longest = rows.new_zeros(len(rows), int(window.offset.max()) + 1)
    longest.scatter_reduce_(1, window.offset, rows, "amax")
    longest = longest.flip(1).cummax(1).values.flip(1)
    shift = torch.arange(start, stop + longest.shape[1] - 1, device=rows.device)
    return longest[:, (shift - stop + 1).clamp(min=0)]


def prepare(rows: Tensor) -> Scatter:
    """Blocks, Gram matrix and traces of ``rows [b, n, D]``, in float64 and shifted."""
    batch, count, width = rows.shape
    size = block_rows(count, width)
    if size == count:
        gram = lower_gram(rows)
        return Scatter(gram, rows[:, None], _trace(gram.diagonal(dim1=1, dim2=2), gram.tril(-1).sum(-1)))
    blocks = math.ceil(count / size)
    padded = torch.nn.functional.pad(rows, (0, 0, 0, blocks * size - count))
    trace = _trace(rows.square().sum(-1), (rows * _sum_before(rows)).sum(-1))
    return Scatter(None, padded.view(batch, blocks, size, width), trace)


def _sum_before(parts: Tensor) -> Tensor:
    """Sum over what comes before along dimension 1. Subtracting from the inclusive sum would round a small part before
    a large one to nothing."""
    return torch.cat([torch.zeros_like(parts[:, :1]), parts[:, :-1].cumsum(1)], dim=1)


def lower_gram(rows: Tensor, tile: int = 128) -> Tensor:
    """Lower triangle of ``rows @ rows.mT`` ``[b, n, n]``; above the diagonal only zeros or the same products."""
    gram = rows.new_zeros(rows.shape[0], rows.shape[1], rows.shape[1])
    for start in range(0, rows.shape[1], tile):
        stop = min(start + tile, rows.shape[1])
        gram[:, start:stop, :stop] = rows[:, start:stop] @ rows[:, :stop].mT
    return gram


def _trace(squares: Tensor, cross: Tensor) -> Tensor:
    """tr S_k of every prefix ``[b, n]`` from |x_i|^2 and sum_{j<i} x_i . x_j, both ``[b, n]``.

    Adding row k to k - 1 rows of mean m adds (k - 1) / k |x_k - m|^2: only nonnegative terms are summed, and equal
    rows, which the shift has made exactly 0, give exactly 0.
    """
    before = torch.arange(squares.shape[1], dtype=squares.dtype, device=squares.device)
    safe = before.clamp(min=1)
    mean_square = _sum_before(squares + 2 * cross) / safe**2
    distance = (squares - 2 * cross / safe + mean_square).clamp(min=0)
    return (distance * (before / (before + 1))).cumsum(1)


def log_determinants(scatter: Scatter, shifts: Tensor, rows: int, workspace: Tensor) -> tuple[Tensor, Tensor]:
    """log det(I + S_k / t) for k = 1..rows of every response and shift.

    ``shifts [b, g]`` positive; ``workspace`` is float64 memory for ``b * g * numel_per_shift`` elements.

    Returns:
        float64 ``[b, g, rows]``, and ``[b, g]``, the number of rows for which they hold: those before the first pivot
        that is not positive, which happens with shifts below the rounding error of the Gram matrix.
    """
    factors = _dense_factors if scatter.gram is not None else _block_factors
    log_pivots, solved, valid = factors(scatter, shifts, rows, workspace)
    k = torch.arange(1, rows + 1, dtype=shifts.dtype, device=shifts.device)
    return log_pivots.cumsum(-1) + (solved.square().cumsum(-1) / k).log(), valid


def numel_per_shift(scatter: Scatter) -> int:
    """Elements of workspace that one response and shift take."""
    _, blocks, size, _ = scatter.blocks.shape
    return blocks * (size + 1) * size


def nested_bytes(rows: int, width: int, shifts: int) -> int:
    """Memory that one response takes if all its shifts are factored at once: its rows and two temporaries, K and a
    copy, and for each shift the factor and a panel, or each block's factor, D x D system and solution."""
    size = block_rows(rows, width)
    blocks = math.ceil(rows / size)
    per_shift = blocks * (size + 1) * size + (blocks > 1) * blocks * 2 * width * (width + size)
    return 8 * (3 * rows * width + 2 * rows * rows + shifts * per_shift)


def _dense_factors(scatter: Scatter, shifts: Tensor, rows: int, workspace: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    assert scatter.gram is not None
    return factor(scatter.gram[:, :rows, :rows], 1 / shifts, shifts.new_ones(1), workspace)


def _block_factors(scatter: Scatter, shifts: Tensor, rows: int, workspace: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As the dense factors, block by block: with S the scatter of the rows before a block X_b, the Schur complement
    of I + K / t is I + X_b (S + t I)^{-1} X_b^T, a sum of positive terms, so nothing cancels."""
    batch, group = shifts.shape
    size, width = scatter.blocks.shape[2:]
    count = math.ceil(rows / size)
    blocks = scatter.blocks[:, :count]
    before, sums_before = _sum_before(blocks.mT @ blocks), _sum_before(blocks.sum(2))
    system = before[:, None].repeat(1, group, 1, 1, 1)
    system.diagonal(dim1=3, dim2=4).add_(shifts[:, :, None, None])
    lower, info = torch.linalg.cholesky_ex(system)
    target = torch.cat([blocks.mT, sums_before[..., None]], dim=3)[:, None].expand(-1, group, -1, -1, -1)
    whitened = torch.linalg.solve_triangular(lower, target, upper=False)
    inner, mean = whitened[..., :size], whitened[..., size:]
    border = 1 - (inner.mT @ mean).reshape(-1, 1, size)
    gram = (inner.mT @ inner).reshape(-1, size, size)
    log_pivots, solved, valid = factor(gram, gram.new_ones(len(gram), 1), border, workspace)
    shape = (batch, group, count * size)
    first_row = size * torch.arange(count, device=valid.device)
    valid = torch.where(info > 0, 0, valid.view(batch, group, count))
    valid = torch.where(valid < size, first_row + valid, rows).amin(2)
    return log_pivots.reshape(shape)[..., :rows], solved.reshape(shape)[..., :rows], valid
