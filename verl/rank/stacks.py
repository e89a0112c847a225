"""Computes the motion of hidden states, and rank metrics of a prompt's stacked responses without storing the stack.

Rows are added one response at a time. Previous rows are summarised by their number, their mean, and at most D rows with
the same centred scatter matrix S_k. For Helmert contrasts z_i (``Chunk.contrasts`` in :mod:`verl.spectral.responses`),
S_k = sum_{i<=k} z_i z_i^T. A QR decomposition of the contrasts so far yields D rows R with R^T R = S_k. Later rows only
add terms to S_k. S_k is never computed, so results equal those of the whole stack up to float64 rounding.

Shapes: L layers, T rows of a response, D hidden width, J prefixes.
"""

import torch
from torch import Tensor

from verl.config.calculator import CalculatorConfig
from verl.rank.dynamics import base_metrics, changes
from verl.spectral import SpectralOptions


class StackedResponses:
    """Computes metrics of a stack of responses, with the same ``calculator`` options as for a single response.

    Curvature and ``own_metrics`` are not available, and ``max_seq_len`` is ignored, so every row is used.
    """

    def __init__(self, config: CalculatorConfig) -> None:
        self.config = config
        self.names = [name for name in config.base_names if name not in ("Curvature", *config.own_names)]
        on_nonfinite = "raise" if config.on_nonfinite == "raise" else "mask"
        self._options = SpectralOptions(on_nonfinite=on_nonfinite)
        self._rows = 0
        self._mean = torch.zeros(0)
        self._contrasts = torch.zeros(0)
        """Contrasts of the stack so far or their triangular factor, float64 ``[L, r, D]`` with r at most D."""
        self._prefixes: dict[str, list[Tensor]] = {name: [] for name in self.names}
        self._whole: dict[str, Tensor] = {}

    def add(self, states: Tensor) -> None:
        """Append the states ``[T, L, D]`` of the next response, with T at least 1, to the stack."""
        rows = states.detach().double().transpose(0, 1)
        if self._rows == 0:
            self._mean = torch.zeros_like(rows[:, 0])
            self._contrasts = rows[:, :0]
        fresh, means = _contrasts(rows, self._mean, self._rows)
        before = self._contrasts
        contrasts = torch.cat([before, fresh], dim=1)
        last = self._rows + rows.shape[1]
        # 1. Select the prefixes that end within this response, plus the whole stack so far.
        stride, extra = self.config.diff_stride, self.config.prefix_extra
        first = (self._rows - extra) // stride + 1 if self._rows > extra else 1
        ends = [j * stride + extra for j in range(first, (last - extra) // stride + 1)]
        ends = ends if self.config.compute_diff else []
        at = torch.tensor([1 + before.shape[1] + end - self._rows for end in [*ends, last]])
        # 2. Construct rows that have these contrasts, and compute the prefixes' metrics from them.
        virtual = _rows_of(contrasts)
        lengths = torch.full((len(rows),), virtual.shape[1])
        measured = base_metrics(virtual, lengths, at.expand(len(rows), -1), self.names, self._options)
        for name, values in measured.items():
            self._prefixes[name].append(values[:, :-1].cpu())
            self._whole[name] = values[:, -1].cpu()
        # 3. Save the state for the next response, compressing the contrasts to at most D rows.
        self._mean, self._rows = means, last
        if contrasts.shape[1] > contrasts.shape[2]:
            contrasts = torch.linalg.qr(contrasts, mode="r").R
        self._contrasts = contrasts

    def metrics(self) -> dict[str, Tensor]:
        """Return metrics of the stack so far, float64 ``[L]`` by name, with velocity and acceleration if configured.

        Raises ``ValueError`` if no response has been added.
        """
        if self._rows == 0:
            raise ValueError("a stack of no responses has no metrics")
        config, metrics = self.config, dict[str, Tensor]()
        for name in self.names:
            metrics[name] = whole = self._whole[name]
            if config.compute_diff:
                values = torch.cat(self._prefixes[name], dim=1)
                counts, rows = (torch.full((len(whole),), n) for n in (values.shape[1], self._rows))
                metrics[f"{name} diff"], metrics[f"{name} diff 2"] = changes(
                    values, counts, whole, config.prefix_rule, rows, rows, config.diff_stride
                )
        return metrics


def _contrasts(rows: Tensor, mean: Tensor, before: int) -> tuple[Tensor, Tensor]:
    """Return the Helmert contrasts ``[L, T, D]`` of ``rows [L, T, D]``, and the mean of all rows.

    The rows are preceded by ``before`` rows with ``mean [L, D]``.
    """
    counts = before + torch.arange(rows.shape[1], dtype=rows.dtype, device=rows.device)
    # Means are kept relative to the running mean, which cancels the (often large) offset shared by all rows.
    shifted = rows - (mean if before else rows[:, 0])[:, None]
    sums = shifted.cumsum(1)
    earlier = torch.cat([torch.zeros_like(sums[:, :1]), sums[:, :-1]], dim=1) / counts.clamp(min=1)[:, None]
    contrasts = (counts / (counts + 1)).sqrt()[:, None] * (shifted - earlier)
    origin = mean if before else rows[:, 0]
    return contrasts, origin + sums[:, -1] / (before + rows.shape[1])


def _rows_of(contrasts: Tensor) -> Tensor:
    """Return rows ``[L, 1 + r, D]`` that start with a row of zeros and have the contrasts ``contrasts [L, r, D]``.

    x_{k+1} = mean of x_1..x_k + sqrt((k + 1) / k) z, which increases the mean by z / sqrt(k (k + 1)).
    """
    k = torch.arange(1, contrasts.shape[1] + 1, dtype=contrasts.dtype, device=contrasts.device)[:, None]
    means = (contrasts / (k * (k + 1)).sqrt()).cumsum(1)
    means = torch.cat([torch.zeros_like(means[:, :1]), means[:, :-1]], dim=1)
    rows = means + ((k + 1) / k).sqrt() * contrasts
    return torch.cat([torch.zeros_like(contrasts[:, :1]), rows], dim=1)


def state_motion(states: Tensor) -> dict[str, Tensor]:
    """Return the speed and dispersion of every prefix of ``states [T, D]``, float64 ``[T]`` by name.

    The speed of k states is the mean distance between consecutive states, or 0 for a single state. The dispersion is
    sqrt(1/k sum_{i<=k} |x_i - mean_k|^2). The sum is the trace of S_k, which equals the sum of squared contrasts.
    """
    rows = states.detach().double()
    counts = torch.arange(1, len(rows) + 1, dtype=rows.dtype, device=rows.device)
    steps = torch.linalg.vector_norm(rows.diff(dim=0), dim=1)
    path = torch.cat([steps.new_zeros(1), steps.cumsum(0)])
    contrasts, _ = _contrasts(rows[None], torch.zeros_like(rows[None, 0]), 0)
    scatter = contrasts[0].square().sum(dim=1).cumsum(0)
    return {"state_speed": path / (counts - 1).clamp(min=1), "state_dispersion": (scatter / counts).sqrt()}


def mean_state_distances(mean_states: Tensor) -> dict[str, float]:
    """Return distances between the mean states ``[n, D]`` of a prompt's responses, keyed as in the paper's release.

    ``pairwise_euclidean_dist`` and ``pairwise_cosine_sim`` are means over pairs, or NaN for a single response;
    ``dist_to_center`` is the mean distance to the centroid.
    """
    states = mean_states.double()
    centre = torch.linalg.vector_norm(states - states.mean(dim=0), dim=1).mean()
    if len(states) < 2:
        return {"pairwise_euclidean_dist": torch.nan, "pairwise_cosine_sim": torch.nan, "dist_to_center": float(centre)}
    units = torch.nn.functional.normalize(states, dim=1)
    i, j = torch.triu_indices(len(states), len(states), offset=1)
    return {
        "pairwise_euclidean_dist": float(torch.linalg.vector_norm(states[i] - states[j], dim=1).mean()),
        "pairwise_cosine_sim": float((units[i] * units[j]).sum(dim=1).mean()),
        "dist_to_center": float(centre),
    }
