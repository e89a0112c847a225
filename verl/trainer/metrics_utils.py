"""Rank metrics of responses and their velocity and acceleration over prefixes (arXiv 2509.23808).

Pure functions. Shapes: B responses, T padded rows, D hidden size, P prefixes of any kind, J prefixes of the
velocity rule. All metrics are float64.
"""

import torch
from torch import Tensor

from verl.config.signal import BASE_METRICS
from verl.spectral.prefixes import clean_chunks, prefix_functionals


def prefix_counts(lengths: Tensor, stride: int) -> Tensor:
    """Number J of velocity prefixes of each response: j = 1..J while ``j * stride < length``. ``[B]`` -> ``[B]``."""
    return (lengths - 1).clamp(min=0) // stride


def prefix_rows(lengths: Tensor, stride: int) -> Tensor:
    """Rows k_j = j * stride + 1 of each response's velocity prefixes, int64 ``[B, max J]``, 0 where absent.

    Raises:
        ValueError: ``stride`` is below 1.
    """
    if stride < 1:
        raise ValueError(f"calculator.diff_stride={stride}: must be at least 1")
    counts = prefix_counts(lengths, stride)
    columns = int(counts.max()) if counts.numel() else 0
    j = torch.arange(1, columns + 1, device=lengths.device)
    return torch.where(j <= counts[:, None], j * stride + 1, 0)


def velocity(values: Tensor, counts: Tensor) -> Tensor:
    """Mean over j = 2..J of delta_j = m_j - mean(m_1..m_{j-1}); 0 for fewer than two prefixes.

    ``values [B, J]`` are the prefix metrics m_j, of which the first ``counts [B]`` are read -> ``[B]``.
    """
    deltas = _deltas(values)
    present = torch.arange(deltas.shape[1], device=values.device) + 2 <= counts[:, None]
    return torch.where(present, deltas, 0.0).sum(1) / (counts - 1).clamp(min=1)


def acceleration(values: Tensor, counts: Tensor) -> Tensor:
    """Mean over j = 2..J-1 of delta_{j+1} - delta_j; 0 for fewer than three prefixes.

    Arguments as in :func:`velocity`. The mean telescopes to (delta_J - delta_2) / (J - 2).
    """
    if values.shape[1] < 3:
        return values.new_zeros(values.shape[0])
    deltas = _deltas(values)
    last = deltas.gather(1, (counts - 2).clamp(min=0)[:, None])[:, 0]
    return torch.where(counts >= 3, (last - deltas[:, 0]) / (counts - 2).clamp(min=1), 0.0)


def _deltas(values: Tensor) -> Tensor:
    """delta_2..delta_J of ``values [B, J]`` -> ``[B, J - 1]`` (``[B, 0]`` when J is 0)."""
    j = torch.arange(1, values.shape[1] + 1, device=values.device)
    running_mean = values.cumsum(1) / j
    return values[:, 1:] - running_mean[:, :-1]


def curvature(hidden: Tensor, lengths: Tensor, rows: Tensor) -> Tensor:
    """Mean angle in radians between consecutive steps Z[j+1] - Z[j], over each response's chosen prefixes.

    ``hidden [B, T, D]``, ``lengths [B]``, ``rows [B, P]`` as for
    :func:`verl.spectral.prefixes.prefix_functionals` -> float64 ``[B, P]`` in [0, pi]. An angle at a step of length
    zero is undefined and left out of the mean; a prefix without any angle (fewer than 3 rows) has curvature 0.

    Raises:
        ValueError: as ``prefix_functionals``.
    """
    result = torch.zeros(rows.shape, dtype=torch.float64, device=hidden.device)
    rows = rows.to(hidden.device)
    for index, states in clean_chunks(hidden, lengths):
        if states.shape[1] < 3:
            continue
        steps = states.diff(dim=1)
        norms = torch.linalg.vector_norm(steps, dim=2, keepdim=True)
        units = steps / torch.where(norms > 0, norms, 1.0)
        before, after = units[:, :-1], units[:, 1:]
        # Kahan's form: unlike acos of the cosine it keeps its digits for nearly parallel steps.
        distance = torch.linalg.vector_norm(after - before, dim=2)
        angles = 2 * torch.atan2(distance, torch.linalg.vector_norm(after + before, dim=2))
        defined = (norms[:, :-1, 0] > 0) & (norms[:, 1:, 0] > 0)
        sums = torch.where(defined, angles, 0.0).cumsum(1)
        counts = defined.cumsum(1)
        # A prefix of k rows holds the first k - 2 angles.
        wanted = rows[index]
        last = (wanted - 3).clamp(min=0)
        mean = sums.gather(1, last) / counts.gather(1, last).clamp(min=1)
        result[index] = torch.where(wanted >= 3, mean, 0.0)
    return result


def base_metrics(hidden: Tensor, lengths: Tensor, rows: Tensor, metric_indices: list[int]) -> dict[str, Tensor]:
    """The metrics ``BASE_METRICS[i]`` for i in ``metric_indices``, of every chosen prefix.

    ``hidden [B, T, D]``, ``lengths [B]``, ``rows [B, P]`` -> name to float64 ``[B, P]``. Degenerate prefixes (0 or
    1 rows, all rows equal): effective rank 1 and its log 0, entropy 0, rank 0, curvature 0.

    Raises:
        ValueError: as ``prefix_functionals``.
    """
    names = [BASE_METRICS[i] for i in metric_indices]
    metrics: dict[str, Tensor] = {}
    if "Curvature" in names:
        metrics["Curvature"] = curvature(hidden, lengths, rows)
    if set(names) - {"Curvature"}:
        spectral = prefix_functionals(hidden, lengths, rows)
        metrics["Response Entropy 1"] = spectral.response_entropy
        metrics["Effective Rank"] = spectral.effective_rank
        metrics["Traditional Rank"] = spectral.traditional_rank
        metrics["Log Effective Rank"] = spectral.effective_rank.log()
    return {name: metrics[name] for name in names}
