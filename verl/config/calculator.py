"""Defines the option group ``calculator``: the rank metrics to compute from hidden states."""

from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from verl.config.checks import NAMES_ONCE, NAMES_ONE, Group, PositiveInt, custom_or, require_import_path

BASE_METRICS = ["Response Entropy 1", "Effective Rank", "Traditional Rank", "Curvature", "Log Effective Rank"]
"""Metrics of a response at one layer. ``calculator.metric_indices`` contains indices into this list."""

TokenMetric = Literal["avg_log_probs", "avg_response_entropy", "avg_logits_entropy"]
"""Token metrics, which need no hidden states, named as in the paper's later release."""

SVDMethod = Literal["full", "lowrank"]


def name_of(metric: str) -> str:
    """Return the name of a metric, or the function's name if ``metric`` is an import path."""
    return metric.rpartition(":")[2].rpartition(".")[2] if ":" in metric else metric


@dataclass(frozen=True)
class CalculatorConfig(Group):
    """Options of the rank metrics, which are computed from hidden states."""

    enable: bool
    """Capture hidden states and compute rank metrics, as required by ``reward_manager.add_reward`` and ``add_adv``."""
    source: Literal["rollout", "actor"]
    """Source of the hidden states. ``rollout`` uses those of the engine during sampling. ``actor`` uses those of the
    forward pass that computes the policy's log-probabilities, for engines that cannot return hidden states. With
    ``source=actor``, validation requires an additional forward pass. Evaluations support only ``rollout``."""
    compare_versions: bool
    """With ``source=rollout``, also measure responses sampled by older weights (``async_training``) under the policy
    that learns from them. Differences in effective rank, velocity and acceleration are logged by lag (docs/metrics.md).
    Training is not affected. This requires the same extra forward pass as ``source=actor``."""
    layers: Annotated[list[int], NAMES_ONE, NAMES_ONCE]
    """Layers whose hidden states are measured, indexed from either end: -1 is the state after the final norm, and all
    others are decoder outputs. Layers are logged in this order as ``layer_1`` etc., and Phi is averaged over them."""
    metric_indices: Annotated[list[int], NAMES_ONE, NAMES_ONCE]
    """Metric indices: 0 Response Entropy 1, 1 Effective Rank, 2 Traditional Rank, 3 Curvature, 4 Log Effective Rank."""
    own_metrics: list[Annotated[str, require_import_path]]
    """Custom metrics: functions of a spectrum, as ``module:function`` or ``file.py:function`` (docs/extending.md). Each
    metric is named after its function, with the suffixes " diff" for velocity and " diff 2" for acceleration. Custom
    metrics require a decomposition of every prefix, so they are slower than all built-in metrics except Traditional
    Rank. The analysis computes custom metrics only for whole responses."""
    metric_indices_add: list[Annotated[str, custom_or(get_args(TokenMetric))]]
    """Token metrics for ``reward_manager`` and the log, in nats, identical in every layer and without velocity:
    ``avg_log_probs``, the mean log-probability of the response's tokens under the policy; ``avg_response_entropy``, the
    entropy of the token frequencies within the response; ``avg_logits_entropy``, the mean entropy of the distributions
    from which its tokens were sampled. ``module:function`` or ``file.py:function`` adds a metric named after the custom
    function (docs/extending.md). The list must be empty in an evaluation."""
    compute_diff: bool
    """Also compute each metric's velocity ("<name> diff") and acceleration ("<name> diff 2")."""
    diff_stride: PositiveInt
    """Number of tokens between consecutive prefixes for velocity and acceleration, at least 1."""
    prefix_rule: Literal["after_stride", "after_stride_and_whole", "at_stride_and_whole"]
    """Prefix lengths for velocity and acceleration, where s is ``diff_stride``. ``after_stride``: s + 1, 2s + 1, ...
    rows. ``after_stride_and_whole``: the same lengths, plus the whole response as the last prefix even if it duplicates
    a prefix; responses shorter than 2s have no prefixes (method ``optimized`` of the paper's later release).
    ``at_stride_and_whole``: s, 2s, ... rows, plus the whole response if these leave out more than one row (the
    release's method ``batched``). Also applies to ``compute_cumulative_global_metrics``."""
    max_seq_len: PositiveInt | None
    """Maximum number of tokens per response used for velocity and acceleration (512 in the paper's first release), or
    null for all. If a response is cut, ``after_stride_and_whole`` does not add the whole response as a prefix, and
    ``at_stride_and_whole`` adds it unless the other prefixes reach the cut."""
    max_seq_len_from: Literal["end", "start"]
    """Part of the response that ``max_seq_len`` keeps: the last tokens (``end``) or the first (``start``)."""
    metrics_dtype: Literal["float64", "bfloat16"]
    """Precision of the effective, log effective and traditional rank of whole responses: ``float64``, or ``bfloat16``
    to round them to 8 significant bits as in the paper's release (301 becomes 300). Other metrics are never rounded."""
    zeroth_order_svd_method: SVDMethod
    """Spectrum of the whole response: ``full``, or ``lowrank`` for only the ``svd_rank`` largest singular values."""
    diff_svd_method: SVDMethod
    """Like ``zeroth_order_svd_method``, but for velocity and acceleration. ``full`` is exact and faster."""
    svd_rank: PositiveInt
    """Number of singular values that ``lowrank`` keeps, at least 1."""
    diff_calculator_method: Literal["optimized", "original"]
    """``optimized`` decomposes all prefixes at once, or computes the eigenvalues of each prefix if that is cheaper;
    ``original`` computes a slow float64 singular value decomposition of every prefix, for comparison."""
    workspace_mb: PositiveInt
    """Memory limit in MiB for computing the spectra of one response, at least 1. vLLM leaves room for it when sizing
    the KV cache. A lower limit is slower, because long responses are factorized in smaller blocks of rows. Only D x D
    matrices may exceed the limit (docs/spectral.md, "Memory")."""
    on_nonfinite: Literal["raise", "mask", "zero"]
    """Treatment of responses whose hidden states contain NaN or infinity. ``raise`` ends the run with an error that
    names the response and the layer. ``mask`` sets the metrics to NaN, gives the response no signal, excludes it from
    all means, and logs the number of such responses. ``zero`` sets the metrics to 0, as in the paper's release."""
    compute_global_metrics: bool
    """Log the metrics ("global/<name>") of a matrix whose rows are the mean hidden states of the batch's responses."""
    compute_cumulative_global_metrics: bool
    """Log velocity and acceleration over rows of the ``compute_global_metrics`` matrix ("cumulative/<name> diff")."""
    global_diff_stride_train: PositiveInt
    """Number of responses between prefixes for ``compute_cumulative_global_metrics`` in training, at least 1."""
    global_diff_stride_val: PositiveInt
    """Like ``global_diff_stride_train``, for validation."""
    shuffle_within_groups: bool
    """In training, randomly permute the rank metrics, token metrics and mean states of the responses to each prompt
    before they are used or logged. This is a control experiment for methods that use hidden states. On average, one of
    the n responses to a prompt keeps its values. The permutation depends on ``seed`` and the step. Prefix and turn
    metrics are not shuffled."""
    keep_prefixes: bool
    """Also return the metrics of each prefix for ``trainer.samples.tokens``. Evaluations do not use these metrics."""

    def measured_by(self, source: str) -> bool:
        """Return whether rank metrics are measured by ``source``, either ``rollout`` or ``actor``."""
        return self.enable and (self.source == source or (self.compare_versions and source == "actor"))

    def check(self) -> None:
        fix = "source=actor measures under the policy that learns already; set source=rollout, or this to false"
        self.require(not self.compare_versions or self.source == "rollout", "compare_versions", fix)
        fix = "it would compare different responses; set one of the two to false"
        self.require(not (self.shuffle_within_groups and self.compare_versions), "shuffle_within_groups", fix)
        known = range(len(BASE_METRICS))
        fix = f"indices run from 0 to {known[-1]}: {BASE_METRICS}"
        self.require(set(self.metric_indices) <= set(known), "metric_indices", fix)
        names = [*BASE_METRICS, *self.own_names]
        fix = "name each once; your own are known by the names of their functions, which no other metric may have"
        self.require(len(set(names)) == len(names), "own_metrics", fix)
        names += map(name_of, self.metric_indices_add)
        self.require(len(set(names)) == len(names), "metric_indices_add", fix)

    @property
    def own_names(self) -> list[str]:
        """Names of the metrics in ``own_metrics``."""
        return [name_of(path) for path in self.own_metrics]

    @property
    def base_names(self) -> list[str]:
        """Metric names without suffixes, in the order of ``metric_indices`` and then ``own_metrics``."""
        return [*(BASE_METRICS[i] for i in self.metric_indices), *self.own_names]

    @property
    def prefix_extra(self) -> int:
        """Number of tokens by which prefixes for velocity exceed multiples of ``diff_stride``."""
        return 0 if self.prefix_rule == "at_stride_and_whole" else 1

    @property
    def metric_names(self) -> list[str]:
        """Names of all metrics that the calculator returns, including velocity and acceleration."""
        suffixes = ["", " diff", " diff 2"] if self.compute_diff else [""]
        return [name + suffix for name in self.base_names for suffix in suffixes]

    @property
    def token_metrics(self) -> list[str]:
        """Token metrics to compute, in the order of ``metric_indices_add`` (none if the calculator is disabled)."""
        return self.metric_indices_add if self.enable else []

    @property
    def needs_policy(self) -> bool:
        """Whether a token metric needs a forward pass of the policy."""
        return any(name != "avg_response_entropy" for name in self.token_metrics)
