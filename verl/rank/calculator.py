"""Computes per-layer rank metrics of a batch of responses (arXiv 2509.23808).

The calculator runs in the process that has the hidden states: a rollout engine, or a worker that recomputes them.

Shapes: B responses, T padded response tokens, L captured layers, D hidden width.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from verl.batch import PREFIX, RANK, Batch
from verl.config.calculator import CalculatorConfig
from verl.config.load import CONFIG_DIR, parse_config
from verl.rank.dynamics import base_metrics, changes, prefix_counts, prefix_rows
from verl.rank.own_metrics import own_measures
from verl.spectral import SpectralOptions
from verl.spectral.bounds import workspace_bound
from verl.utils.device import to_device

RANKS = ("Effective Rank", "Log Effective Rank", "Traditional Rank")
"""Metrics that are rounded to ``calculator.metrics_dtype``."""

PADDED_BYTES = 256 << 20
"""Maximum size in bytes of a padded copy of hidden states in :meth:`RepresentationMetricsCalculator.measure`."""

VECTORS = 256
"""Upper bound on the number of float64 vectors [T] needed to measure a response: two copies of the pivots of all
shifts, and a few vectors per function."""


class RepresentationMetricsCalculator:
    """Computes effective rank and related metrics of hidden states, with their velocity and acceleration.

    Args:
        config: Calculator config, by default ``configs/calculator/default.yaml``.
        options: Config fields to override, such as ``diff_stride=40``.
    """

    def __init__(self, config: CalculatorConfig | None = None, **options: Any) -> None:
        self.config = config = replace(config or _shipped_config(), **options)
        decompose = {"optimized": "auto", "original": "svd"}[config.diff_calculator_method]
        self._whole = _options(config, config.zeroth_order_svd_method, "auto")
        self._diff = _options(config, config.diff_svd_method, decompose)
        self._own = own_measures(config.own_metrics)

    def __call__(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor,
        compute_diff: bool | None = None,
        diff_stride: int | None = None,
    ) -> dict[str, dict[str, Tensor]]:
        """Return metrics of every response and layer in the format of the paper's release.

        Raises ``ValueError`` if the shapes do not match or the mask is not right-padded. With ``on_nonfinite=raise``,
        NaN or infinity in a valid row also raises an error, which names the layer and the response.

        Args:
            hidden_states: Floating-point states ``[B, T, L, D]``; row j is the state from which token j was sampled.
            attention_mask: Right-padded mask ``[B, T]`` of 0 and 1 or of bools.
            compute_diff: Whether to add velocity and acceleration ("<name> diff" and "<name> diff 2"), or None to use
                the config.
            diff_stride: Number of tokens between prefixes, or None to use the config.

        Returns:
            Metrics as float64 ``[B]`` on the device of ``hidden_states``, by layer key ("1".."L" in capture order) and
            name. ``calculator.on_nonfinite`` determines the results for responses with NaN or infinity.
        """
        if hidden_states.dim() != 4 or attention_mask.shape != hidden_states.shape[:2]:
            raise ValueError(
                f"hidden_states {tuple(hidden_states.shape)} and attention_mask {tuple(attention_mask.shape)}: "
                "expected [B, T, L, D] and [B, T]"
            )
        lengths = _lengths(attention_mask.cpu())
        compute_diff = self.config.compute_diff if compute_diff is None else compute_diff
        stride = self.config.diff_stride if diff_stride is None else diff_stride
        layers, _ = self._measure(hidden_states, lengths, compute_diff, stride)
        return {str(layer): metrics for layer, metrics in enumerate(layers, start=1)}

    def _measure(
        self, hidden_states: Tensor, lengths: Tensor, compute_diff: bool, stride: int
    ) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
        """Return the metrics ``[B]`` and prefix metrics ``[B, T]`` by name, for each layer of ``hidden_states``."""
        metrics, by_prefix = list[dict[str, Tensor]](), list[dict[str, Tensor]]()
        for layer in range(hidden_states.shape[2]):
            try:
                states = hidden_states[:, :, layer]
                measured, prefixes = self._layer_metrics(states, lengths, compute_diff, stride)
            except ValueError as error:
                raise ValueError(f"layer {layer + 1}: {error}") from error
            metrics.append({name: self._stored(name, values) for name, values in measured.items()})
            by_prefix.append(prefixes)
        return metrics, by_prefix

    def measure(self, states: list[Tensor]) -> Batch:
        """Measure complete responses of any length, each independently of the other responses.

        Args:
            states: Hidden states ``[T, L, D]`` of each response, with T at least 1; at least one response is required.

        Returns:
            Episodes without prompts, with rank metric columns on the device of ``states``.

        Raises:
            ValueError: See :meth:`__call__`; the message gives the response's index in its padded batch.
        """
        config, parts = self.config, list[Batch]()
        longest = max(len(response) for response in states)
        at_once = max(1, PADDED_BYTES // max(1, longest * states[0][0].nbytes))
        for start in range(0, len(states), at_once):
            responses = states[start : start + at_once]
            # Avoid copying a single response, since it can be very long.
            padded = responses[0][None] if len(responses) == 1 else pad_sequence(responses, batch_first=True)
            lengths = torch.tensor([len(response) for response in responses])
            layers, prefixes = self._measure(padded, lengths, config.compute_diff, config.diff_stride)
            columns = {RANK + name: values for name, values in _stacked(layers).items()}
            if config.keep_prefixes:
                valid = torch.arange(padded.shape[1]) < lengths[:, None]
                places = to_device(valid.flatten().nonzero()[:, 0], padded.device)
                by_token = {PREFIX + name: values.transpose(1, 2) for name, values in _stacked(prefixes).items()}
                columns |= {name: values.flatten(0, 1)[places].float() for name, values in by_token.items()}
            columns["mean_states"] = torch.stack([_mean(response) for response in responses])
            parts.append(Batch(torch.zeros_like(lengths), lengths).fill(**columns))
        return Batch.join(parts)

    def dataset_metrics(self, mean_states: Tensor, diff_stride: int) -> dict[str, float]:
        """Return metrics of ``mean_states [B, D]``, which are the mean hidden states of responses in one layer.

        ``compute_global_metrics`` adds "global/<name>" for the whole matrix. ``compute_cumulative_global_metrics`` adds
        "cumulative/<name> diff" and "cumulative/<name> diff 2" over prefixes of the responses in the given order,
        ``diff_stride`` responses apart. With ``on_nonfinite=mask``, states with NaN or infinity are dropped. With
        ``on_nonfinite=zero``, any such state sets every metric to 0. Raises ``ValueError`` if the input is not a matrix
        or, with ``on_nonfinite=raise``, contains NaN or infinity.
        """
        if mean_states.dim() != 2:
            raise ValueError(f"mean_states {tuple(mean_states.shape)}: expected [B, D]")
        config = self.config
        if not (config.compute_global_metrics or config.compute_cumulative_global_metrics):
            return {}
        finite = mean_states.isfinite().all(1)
        if config.on_nonfinite == "mask":
            mean_states = mean_states[finite]
        elif config.on_nonfinite == "raise" and not bool(finite.all()):
            first = int((~finite).nonzero()[0])
            raise ValueError(f"mean_states[{first}]: holds NaN or infinity; check the model's weights and the capture")
        lengths = torch.tensor([len(mean_states)])
        cumulative = config.compute_cumulative_global_metrics
        (metrics,), _ = self._measure(mean_states[None, :, None, :], lengths, cumulative, diff_stride)
        wanted = {f"global/{name}": name for name in config.base_names if config.compute_global_metrics}
        if cumulative:
            wanted |= {f"cumulative/{name}": name for name in metrics if name not in config.base_names}
        return {key: float(metrics[name]) for key, name in wanted.items()}

    def _stored(self, name: str, values: Tensor) -> Tensor:
        """Apply ``metrics_dtype`` and ``on_nonfinite=zero`` to the ``values [B]`` of a metric and return float64."""
        if self.config.on_nonfinite == "zero":
            values = values.nan_to_num(nan=0.0)
        return self._rounded(name, values)

    def _rounded(self, name: str, values: Tensor) -> Tensor:
        rounded = self.config.metrics_dtype == "bfloat16" and name in RANKS
        return values.bfloat16().double() if rounded else values

    def _layer_metrics(
        self, hidden: Tensor, lengths: Tensor, compute_diff: bool, stride: int
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the metrics ``[B]`` and the prefix metrics ``[B, T]`` of one layer ``[B, T, D]``, by name."""
        names, config = self.config.base_names, self.config
        if not compute_diff:
            whole = base_metrics(hidden, lengths, lengths[:, None], names, self._whole, self._own)
            courses = self._courses(whole, lengths[:, None], hidden)
            return {name: values[:, 0] for name, values in whole.items()}, courses
        # 1. Select the rows from which prefixes are taken, and the end of each prefix.
        kept, kept_lengths = _kept_rows(hidden, lengths, config.max_seq_len, config.max_seq_len_from)
        counts, rows = (of(kept_lengths, stride, config.prefix_extra) for of in (prefix_counts, prefix_rows))
        # 2. Compute base metrics of all prefixes and of the whole response, in one pass if both use the same method.
        if kept is hidden and self._whole == self._diff:
            ends = torch.cat([rows, lengths[:, None]], dim=1)
            both = base_metrics(hidden, lengths, ends, names, self._whole, self._own)
            whole = {name: values[:, -1:] for name, values in both.items()}
            prefixes = {name: values[:, :-1] for name, values in both.items()}
        else:
            whole = base_metrics(hidden, lengths, lengths[:, None], names, self._whole, self._own)
            prefixes = base_metrics(kept, kept_lengths, rows, names, self._diff, self._own)
        # 3. Map the prefix metrics to tokens, for ``keep_prefixes``.
        measured = {name: torch.cat([prefixes[name], whole[name]], dim=1) for name in names}
        before = lengths - kept_lengths if config.max_seq_len_from == "end" else torch.zeros_like(lengths)
        last_rows = torch.where(rows > 0, rows + before[:, None], 0)
        courses = self._courses(measured, torch.cat([last_rows, lengths[:, None]], dim=1), hidden)
        # 4. Compute velocity and acceleration.
        counts, lengths, kept_lengths = (to_device(n, hidden.device) for n in (counts, lengths, kept_lengths))
        metrics: dict[str, Tensor] = {}
        for name in names:
            metrics[name] = whole[name][:, 0]
            stored = self._rounded(name, metrics[name])
            metrics[f"{name} diff"], metrics[f"{name} diff 2"] = changes(
                prefixes[name], counts, stored, config.prefix_rule, lengths, kept_lengths, stride
            )
        return metrics, courses

    def _courses(self, values: Mapping[str, Tensor], rows: Tensor, hidden: Tensor) -> dict[str, Tensor]:
        """Scatter prefix metrics ``[B, J]`` to the tokens of ``hidden [B, T, D]`` where the prefixes end.

        ``rows [B, J]`` are 1-based prefix ends, or 0 for absent prefixes. Returns a tensor ``[B, T]`` for each metric,
        with NaN at all other tokens, or no tensors without ``keep_prefixes``.
        """
        if not self.config.keep_prefixes:
            return {}
        # An extra column before the first token absorbs absent prefixes.
        tokens = torch.full((len(hidden), hidden.shape[1] + 1), torch.nan, dtype=torch.float64, device=hidden.device)
        rows = to_device(rows, hidden.device)
        return {name: tokens.scatter(1, rows, by_row.double())[:, 1:] for name, by_row in values.items()}


def _mean(states: Tensor) -> Tensor:
    """Return the float32 mean of ``states [T, L, D]`` over tokens, copying only one layer at a time."""
    return torch.stack([states[:, layer].float().mean(dim=0) for layer in range(states.shape[1])])


def _stacked(layers: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Stack the per-layer tensors ``[B, ...]`` of each metric into ``[B, L, ...]``."""
    return {name: torch.stack([layer[name] for layer in layers], dim=1) for name in layers[0]}


def capture_options(config: CalculatorConfig, reduces: bool = True) -> dict[str, Any]:
    """Return the ``additional_config["hidden_states"]`` that makes a vLLM engine measure every response.

    Without ``reduces``, the engine returns raw states on the CPU instead, because conversations are measured only after
    they have finished.

    vLLM passes these options through JSON, so the calculator config is a JSON string that each process parses once.
    """
    reducer = f"{__name__}:{reduce_states.__name__}"
    captured = {"layers": config.layers, "ranks": "first"}
    if not reduces:
        return captured
    return captured | {
        "reducer": reducer,
        "workspace": f"{__name__}:{workspace_bytes.__name__}",
        "reducer_options": {"calculator": json.dumps(asdict(config))},
    }


def reduce_states(states: list[Tensor], calculator: str) -> dict[str, Tensor]:
    """Measure responses. This is the ``vllm_patches`` reducer that :func:`capture_options` configures.

    Args:
        states: States ``[T, L, D]`` of each finished response.
        calculator: Fields of :class:`CalculatorConfig` as JSON.

    Returns:
        Columns of :meth:`RepresentationMetricsCalculator.measure` by name.

    Raises:
        ValueError: See :meth:`RepresentationMetricsCalculator.measure`.
    """
    measured = _calculator(calculator).measure(states)
    return {name: getattr(measured, name) for name in measured.names}


def workspace_bytes(num_tokens: int, num_layers: int, width: int, calculator: str | CalculatorConfig) -> int:
    """Return an upper bound in bytes on the memory needed to measure responses, excluding their hidden states.

    Layers are measured one at a time. The bound covers float64 matrices, a padded copy of several short responses, a
    float32 copy of one layer for its mean, and the metrics of each prefix.

    Args:
        num_tokens: Length of the longest response.
        num_layers: Number of captured layers L.
        width: Hidden width D.
        calculator: Calculator config, or its fields as JSON as in :func:`reduce_states`.
    """
    config = _calculator(calculator).config if isinstance(calculator, str) else calculator
    decomposes = "Traditional Rank" in config.base_names or bool(config.own_metrics)
    decomposes |= config.diff_calculator_method == "original"
    decomposes |= "lowrank" in (config.zeroth_order_svd_method, config.diff_svd_method)
    spectra = workspace_bound(num_tokens, width, decomposes, config.workspace_mb << 20)
    prefixes = 8 * num_tokens * (num_layers * len(config.base_names) + VECTORS)
    return max(spectra, 4 * num_tokens * width) + PADDED_BYTES + prefixes


@cache
def _shipped_config() -> CalculatorConfig:
    tree: Any = OmegaConf.create((CONFIG_DIR / "calculator" / "default.yaml").read_text())
    return parse_config(CalculatorConfig, tree)


@cache
def _calculator(options: str) -> RepresentationMetricsCalculator:
    return RepresentationMetricsCalculator(CalculatorConfig(**json.loads(options)))


def _options(config: CalculatorConfig, svd_method: str, method: str) -> SpectralOptions:
    rank = config.svd_rank if svd_method == "lowrank" else None
    # With ``zero``, metrics are first set to NaN and later replaced with 0.
    on_nonfinite = "raise" if config.on_nonfinite == "raise" else "mask"
    return SpectralOptions(method=method, svd_rank=rank, on_nonfinite=on_nonfinite, max_bytes=config.workspace_mb << 20)


def _kept_rows(hidden: Tensor, lengths: Tensor, most: int | None, end: str) -> tuple[Tensor, Tensor]:
    """Return the first or last ``most`` valid hidden states of each response, left-aligned, and their number."""
    if most is None or hidden.shape[1] <= most:
        return hidden, lengths
    if end == "start":
        return hidden, lengths.clamp(max=most)
    first = (lengths - most).clamp(min=0)
    at = to_device(first[:, None] + torch.arange(most), hidden.device)
    return hidden.gather(1, at[:, :, None].expand(-1, -1, hidden.shape[2])), lengths - first


def _lengths(attention_mask: Tensor) -> Tensor:
    """Count the valid tokens per response, int64 ``[B]``. Raises ``ValueError`` if the mask is not right-padded."""
    lengths = attention_mask.bool().sum(1)
    expected = torch.arange(attention_mask.shape[1], device=attention_mask.device) < lengths[:, None]
    wrong = (attention_mask != expected).any(1).nonzero()
    if len(wrong):
        raise ValueError(f"attention_mask of response {int(wrong[0])}: must be right-padded, ones and then zeros")
    return lengths
