"""Computes rank metrics of responses, and their velocity and acceleration over prefixes (arXiv 2509.23808).

All functions are pure, and all metrics are float64. Shapes: B responses, T padded rows, D hidden size, P arbitrary
prefixes, J velocity prefixes.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from verl.spectral import SpectralMeasure, SpectralOptions
from verl.spectral.prefixes import prefix_functionals, prefix_measures
from verl.spectral.responses import Chunk, check_hidden, chunks, largest_entries, masked_rows
from verl.utils.device import to_device

_FUNCTIONALS = {
    "Response Entropy 1": "response_entropy",
    "Effective Rank": "effective_rank",
    "Traditional Rank": "traditional_rank",
    "Log Effective Rank": "effective_rank",
}
"""Name of each spectral metric in ``verl.spectral``. The log effective rank is computed from the effective rank."""

_CURVATURE_BYTES = 64 * 2**20
"""Maximum size in bytes of the float64 states that :func:`curvature` processes at once."""


def prefix_counts(lengths: Tensor, stride: int, extra: int = 1) -> Tensor:
    """Return the number J of velocity prefixes of each response: the largest j with ``j * stride + extra <= length``.

    ``[B]`` -> ``[B]``; ``extra`` is 1, or 0 with ``calculator.prefix_rule=at_stride_and_whole``.
    """
    return (lengths - extra).clamp(min=0) // stride


def prefix_rows(lengths: Tensor, stride: int, extra: int = 1) -> Tensor:
    """Return the lengths k_j = j * stride + extra of the velocity prefixes, int64 ``[B, max J]``, padded with 0.

    Raises ``ValueError`` if ``stride`` is less than 1.
    """
    if stride < 1:
        raise ValueError(f"calculator.diff_stride={stride}: must be at least 1")
    counts = prefix_counts(lengths, stride, extra)
    columns = int(counts.max()) if counts.numel() else 0
    j = torch.arange(1, columns + 1, device=lengths.device)
    return torch.where(j <= counts[:, None], j * stride + extra, 0)


def changes(
    values: Tensor, counts: Tensor, whole: Tensor, rule: str, lengths: Tensor, kept: Tensor, stride: int
) -> tuple[Tensor, Tensor]:
    """Return velocity and acceleration ``[B]`` of one metric, with NaN where ``whole`` is NaN.

    Args:
        values: Prefix metrics ``[B, J]``; only the first ``counts [B]`` in each row are valid.
        whole: Metrics ``[B]`` of the whole responses.
        rule: Value of ``calculator.prefix_rule``; it determines whether the whole response is the last prefix.
        lengths: Number of rows per response, ``[B]``; ``kept [B]`` of these are used for prefixes.
    """
    # Keep NaN for masked responses, which would get 0 if they had fewer than two prefixes.
    masked = torch.where(whole.isnan(), torch.nan, 0.0)
    if rule != "after_stride":
        if rule == "after_stride_and_whole":
            ends_whole = (kept == lengths) & (lengths >= 2 * stride)
        else:
            ends_whole = (counts > 0) & (counts * stride < kept - 1)
        longer = torch.cat([values, values.new_zeros(values.shape[0], 1)], dim=1)
        values, counts = longer.scatter(1, counts[:, None], whole[:, None]), counts + ends_whole
    return velocity(values, counts) + masked, acceleration(values, counts) + masked


def velocity(values: Tensor, counts: Tensor) -> Tensor:
    """Return the mean over j = 2..J of delta_j = m_j - mean(m_1..m_{j-1}), or 0 for fewer than two prefixes.

    ``values [B, J]`` are the prefix metrics m_j; only the first ``counts [B]`` in each row are read. Returns ``[B]``.
    """
    deltas = _deltas(values)
    present = torch.arange(deltas.shape[1], device=values.device) + 2 <= counts[:, None]
    return torch.where(present, deltas, 0.0).sum(1) / (counts - 1).clamp(min=1)


def acceleration(values: Tensor, counts: Tensor) -> Tensor:
    """Return the mean over j = 2..J-1 of delta_{j+1} - delta_j, or 0 for fewer than three prefixes.

    The arguments are the same as in :func:`velocity`. The mean telescopes to (delta_J - delta_2) / (J - 2).
    """
    if values.shape[1] < 3:
        return values.new_zeros(values.shape[0])
    deltas = _deltas(values)
    last = deltas.gather(1, (counts - 2).clamp(min=0)[:, None])[:, 0]
    return torch.where(counts >= 3, (last - deltas[:, 0]) / (counts - 2).clamp(min=1), 0.0)


def _deltas(values: Tensor) -> Tensor:
    """Return delta_2..delta_J, ``[B, J - 1]``, for ``values [B, J]``, or ``[B, 0]`` if J is 0."""
    j = torch.arange(1, values.shape[1] + 1, device=values.device)
    running_mean = values.cumsum(1) / j
    return values[:, 1:] - running_mean[:, :-1]


def curvature(hidden: Tensor, lengths: Tensor, rows: Tensor, on_nonfinite: str = "raise") -> Tensor:
    """Return the mean angle in radians between consecutive steps Z[j+1] - Z[j], for the requested prefixes.

    The arguments ``hidden [B, T, D]``, ``lengths [B]``, ``rows [B, P]`` and ``on_nonfinite`` are the same as in
    :func:`verl.spectral.prefix_functionals`. The result is float64 ``[B, P]`` in [0, pi]. Angles at zero-length steps
    are undefined and ignored. A prefix without defined angles, such as a prefix of fewer than 3 rows, has curvature 0.

    Raises:
        ValueError: See ``prefix_functionals``.
    """
    lengths, rows = lengths.cpu(), rows.cpu()
    check_hidden(hidden, lengths)
    largest = largest_entries(hidden, lengths, on_nonfinite)
    result = torch.zeros(rows.shape, dtype=torch.float64, device=hidden.device)
    result[masked_rows(largest, hidden.device)] = torch.nan
    for chunk in chunks(hidden, lengths, largest, lambda n: 8 * 4 * n * hidden.shape[2], _CURVATURE_BYTES):
        if chunk.longest < 3:
            continue
        parts = []
        block = max(1, _CURVATURE_BYTES // (8 * 6 * len(chunk) * chunk.width))
        # The angle at row j + 1 depends on rows j to j + 2.
        for start in range(0, chunk.longest - 2, block):
            parts.append(_angles(chunk, start, min(start + block + 2, chunk.longest)))
        angles, defined = (torch.cat(part, dim=1) for part in zip(*parts, strict=True))
        sums = torch.where(defined, angles, 0.0).cumsum(1)
        counts = defined.cumsum(1)
        # A prefix of k rows contains the first k - 2 angles.
        wanted = to_device(rows[chunk.which], hidden.device)
        last = (wanted - 3).clamp(min=0)
        mean = sums.gather(1, last) / counts.gather(1, last).clamp(min=1)
        result[chunk.index] = torch.where(wanted >= 3, mean, 0.0)
    return result


def _angles(chunk: Chunk, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """Return the angles ``[b, stop - start - 2]`` in rows ``start`` to ``stop - 1``, and a mask of defined angles."""
    steps = chunk.rows(start, stop).diff(dim=1)
    # Only directions matter. Dividing by the largest entry first keeps the squares of tiny steps from underflowing.
    steps = steps.div_(steps.abs().amax(2, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny))
    norms = torch.linalg.vector_norm(steps, dim=2, keepdim=True)
    units = steps.div_(torch.where(norms > 0, norms, 1.0))
    before, after = units[:, :-1], units[:, 1:]
    # Kahan's formula, unlike acos of the cosine, stays accurate for nearly parallel steps.
    distance = torch.linalg.vector_norm(after - before, dim=2)
    angles = 2 * torch.atan2(distance, torch.linalg.vector_norm(after + before, dim=2))
    return angles, (norms[:, :-1, 0] > 0) & (norms[:, 1:, 0] > 0)


@torch.no_grad()
def base_metrics(
    hidden: Tensor,
    lengths: Tensor,
    rows: Tensor,
    names: Sequence[str],
    options: SpectralOptions,
    own: Mapping[str, SpectralMeasure] | None = None,
) -> dict[str, Tensor]:
    """Compute the metrics ``names`` of prefixes. Names are in ``BASE_METRICS`` or are custom metrics in ``own``.

    ``hidden [B, T, D]``, ``lengths [B]``, ``rows [B, P]`` -> float64 ``[B, P]`` by name. Prefixes with fewer than 2
    rows or only equal rows have effective rank 1. Their log effective rank, entropy, rank and curvature are 0.

    Raises:
        ValueError: See :func:`verl.spectral.prefix_functionals`.
    """
    metrics: dict[str, Tensor] = {}
    if own:
        measured = prefix_measures(hidden, lengths, rows, list(own.values()), options)
        metrics |= zip(own, measured, strict=True)
    if "Curvature" in names:
        metrics["Curvature"] = curvature(hidden, lengths, rows, options.on_nonfinite)
    wanted = list(dict.fromkeys(_FUNCTIONALS[name] for name in names if name in _FUNCTIONALS))
    spectral = prefix_functionals(hidden, lengths, rows, wanted, options)
    for name in names:
        if name in _FUNCTIONALS:
            values = spectral[_FUNCTIONALS[name]]
            metrics[name] = values.log() if name == "Log Effective Rank" else values
    return {name: metrics[name] for name in names}


def by_layer(metrics: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Split metrics ``[B, L]`` into one dict of metrics ``[B]`` per layer."""
    layers = max((values.shape[1] for values in metrics.values()), default=0)
    return [{name: values[:, layer] for name, values in metrics.items()} for layer in range(layers)]
