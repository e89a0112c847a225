"""Rank metrics of a batch of responses, layer by layer (arXiv 2509.23808).

Runs where the hidden states are: it depends on torch, ``verl.spectral`` and ``verl.config`` alone and can be
pickled into a rollout worker.
"""

import torch
from torch import Tensor

from verl.config.signal import BASE_METRICS
from verl.trainer.metrics_utils import acceleration, base_metrics, prefix_counts, prefix_rows, velocity

RankMetrics = dict[str, dict[str, Tensor]]
"""Layer key ("1".."L") to metric name to float64 ``[B]``."""


class RepresentationMetricsCalculator:
    """Turns hidden states into effective rank, velocity, acceleration and their relatives."""

    def __init__(self, metric_indices: list[int], diff_stride: int) -> None:
        """``metric_indices`` index ``BASE_METRICS``; ``diff_stride`` is the number of tokens between two prefixes.

        Raises:
            ValueError: an index is out of range or given twice, none is given, or the stride is below 1.
        """
        valid = range(len(BASE_METRICS))
        if not metric_indices or len(set(metric_indices)) < len(metric_indices):
            raise ValueError(f"calculator.metric_indices={metric_indices}: name at least one metric, each once")
        if any(i not in valid for i in metric_indices):
            raise ValueError(
                f"calculator.metric_indices={metric_indices}: indices run from 0 to {valid[-1]}: {BASE_METRICS}"
            )
        if diff_stride < 1:
            raise ValueError(f"calculator.diff_stride={diff_stride}: must be at least 1")
        self.metric_indices = list(metric_indices)
        self.diff_stride = diff_stride

    def __call__(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor,
        compute_diff: bool = True,
        diff_stride: int | None = None,
    ) -> RankMetrics:
        """Metrics of every response and layer.

        Args:
            hidden_states: ``[B, T, L, D]`` floating point; row j is the state from which token j was sampled.
            attention_mask: ``[B, T]`` of 0 and 1 (or bool), right-padded: valid rows first.
            compute_diff: also give "<name> diff" (velocity) and "<name> diff 2" (acceleration).
            diff_stride: tokens between two prefixes, in place of the calculator's own.

        Returns:
            Layer keys "1".."L" in the order the layers were captured, then metric name, then float64 ``[B]`` on
            the device of ``hidden_states``.

        Raises:
            ValueError: shapes do not fit, the mask is not right-padded, or a valid row holds NaN or infinity
                (names the layer and the response).
        """
        if hidden_states.dim() != 4 or attention_mask.shape != hidden_states.shape[:2]:
            raise ValueError(
                f"hidden_states {tuple(hidden_states.shape)} and attention_mask {tuple(attention_mask.shape)}: "
                "expected [B, T, L, D] and [B, T]"
            )
        lengths = _lengths(attention_mask.to(hidden_states.device))
        stride = self.diff_stride if diff_stride is None else diff_stride
        metrics: RankMetrics = {}
        for layer in range(hidden_states.shape[2]):
            key = str(layer + 1)
            try:
                metrics[key] = self._layer_metrics(hidden_states[:, :, layer], lengths, compute_diff, stride)
            except ValueError as error:
                raise ValueError(f"layer {key}: {error}") from error
        return metrics

    def dataset_metrics(
        self, mean_states: Tensor, compute_diff: bool = True, diff_stride: int | None = None
    ) -> dict[str, float]:
        """Metrics of the matrix ``mean_states [B, D]``, one mean hidden state per response, for one layer.

        Returns "global/<name>" for the whole matrix and, with ``compute_diff``, "cumulative/<name> diff" and
        "cumulative/<name> diff 2" over prefixes of the responses in the order given.

        Raises:
            ValueError: not a matrix, or a state holds NaN or infinity.
        """
        if mean_states.dim() != 2:
            raise ValueError(f"mean_states {tuple(mean_states.shape)}: expected [B, D]")
        if not bool(mean_states.isfinite().all()):
            raise ValueError("mean_states: holds NaN or infinity; check the model's weights and the capture")
        mask = torch.ones(1, mean_states.shape[0], dtype=torch.bool, device=mean_states.device)
        metrics = self(mean_states[None, :, None, :], mask, compute_diff, diff_stride)["1"]
        base_names = {BASE_METRICS[i] for i in self.metric_indices}
        return {
            f"global/{name}" if name in base_names else f"cumulative/{name}": float(value)
            for name, value in metrics.items()
        }

    def _layer_metrics(self, hidden: Tensor, lengths: Tensor, compute_diff: bool, stride: int) -> dict[str, Tensor]:
        """Metrics of one layer ``[B, T, D]``: name to ``[B]``."""
        # The whole response is one more prefix, the last column.
        rows = lengths[:, None]
        if compute_diff:
            rows = torch.cat([prefix_rows(lengths, stride), rows], dim=1)
            counts = prefix_counts(lengths, stride)
        metrics: dict[str, Tensor] = {}
        for name, values in base_metrics(hidden, lengths, rows, self.metric_indices).items():
            metrics[name] = values[:, -1]
            if compute_diff:
                metrics[f"{name} diff"] = velocity(values[:, :-1], counts)
                metrics[f"{name} diff 2"] = acceleration(values[:, :-1], counts)
        return metrics


def _lengths(attention_mask: Tensor) -> Tensor:
    """Valid rows of each response, int64 ``[B]``; raises ``ValueError`` unless the mask is right-padded 0 and 1."""
    lengths = attention_mask.bool().sum(1)
    expected = torch.arange(attention_mask.shape[1], device=attention_mask.device) < lengths[:, None]
    wrong = (attention_mask != expected).any(1).nonzero()
    if len(wrong):
        raise ValueError(f"attention_mask of response {int(wrong[0])}: must be right-padded, ones and then zeros")
    return lengths
