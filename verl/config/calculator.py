"""The group ``calculator``: which rank metrics are computed from the rollout's hidden states."""

from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from verl.config.checks import NAMES_ONCE, NAMES_ONE, Group, PositiveInt, custom_or, require_import_path

BASE_METRICS = ["Response Entropy 1", "Effective Rank", "Traditional Rank", "Curvature", "Log Effective Rank"]
"""The metrics of one response and layer, in the order that ``calculator.metric_indices`` indexes."""

TokenMetric = Literal["avg_log_probs", "avg_response_entropy", "avg_logits_entropy"]
"""Metrics of a response's tokens, which need no hidden states, by the names of the paper's later release."""

SVDMethod = Literal["full", "lowrank"]


def name_of(metric: str) -> str:
    """Return the name of a metric, that of the user's function for an import path."""
    return metric.rpartition(":")[2].rpartition(".")[2] if ":" in metric else metric


@dataclass(frozen=True)
class CalculatorConfig(Group):
    """Which rank metrics are computed from the rollout's hidden states."""

    enable: bool
    """Capture hidden states and compute rank metrics; needed by ``reward_manager.add_reward`` and ``add_adv``."""
    source: Literal["rollout", "actor"]
    """Source of hidden states: ``rollout``, the engine while it samples; or ``actor``, the forward pass that
    computes the policy's log-probabilities, for engines that cannot return hidden states. Validation then needs this
    extra pass. Evaluation supports ``rollout`` only."""
    compare_versions: bool
    """With ``source=rollout`` and responses of older weights (``async_training``), measure them under the policy that
    learns from them, too, and log how far its effective rank, velocity and acceleration are from the engine's, by lag
    (docs/metrics.md). Changes nothing that is learned. Costs the pass of ``source=actor``."""
    layers: Annotated[list[int], NAMES_ONE, NAMES_ONCE]
    """Layers whose hidden states are measured, counted from either end: -1 is the state after the final norm, any other
    the output of that decoder layer. Logged as ``layer_1``, ``layer_2``, ... in this order; Phi is their mean."""
    metric_indices: Annotated[list[int], NAMES_ONE, NAMES_ONCE]
    """The metrics to compute: 0 Response Entropy 1, 1 Effective Rank, 2 Traditional Rank, 3 Curvature, 4 Log Effective
    Rank."""
    own_metrics: list[Annotated[str, require_import_path]]
    """Further, custom metrics: functions of a spectrum, each as ``module:function`` or ``file.py:function``
    (docs/extending.md). A metric is known by the function's name, its velocity and acceleration by that name with
    " diff" and " diff 2". Their spectra are decomposed prefix by prefix, which takes longer
    than ``metric_indices`` without 2; the analysis has them for responses only."""
    metric_indices_add: list[Annotated[str, custom_or(get_args(TokenMetric))]]
    """Metrics of a response's tokens for ``reward_manager`` and the log, the same in every layer and without velocity,
    in nats: ``avg_log_probs``, the mean log-probability of its tokens under the policy; ``avg_response_entropy``, the
    entropy of the token frequencies within the response; ``avg_logits_entropy``, the mean entropy of the distributions
    its tokens were sampled from. Or your own, as ``module:function`` or ``file.py:function``, known by the function's
    name (docs/extending.md). Must be empty in an evaluation."""
    compute_diff: bool
    """Also compute each metric's velocity ("<name> diff") and acceleration ("<name> diff 2")."""
    diff_stride: PositiveInt
    """Tokens between two consecutive prefixes of the velocity and acceleration, at least 1."""
    prefix_rule: Literal["after_stride", "after_stride_and_whole", "at_stride_and_whole"]
    """Prefixes of the velocity and acceleration, s being ``diff_stride``. ``after_stride``: s + 1, 2s + 1, ... rows.
    ``after_stride_and_whole``: the same, and the whole response once more as the last one, even if a prefix was it
    already, but no prefix of a response that is shorter than 2s (the paper's later release, its method ``optimized``).
    ``at_stride_and_whole``: s, 2s, ... rows, and the whole response as the last one where these leave out more than one
    row (its method ``batched``). Also the rule of ``compute_cumulative_global_metrics``."""
    max_seq_len: PositiveInt | None
    """Velocity and acceleration use only this many tokens of a response (512 in the paper's first release); null: all.
    A cut response has no last prefix by ``after_stride_and_whole``; by ``at_stride_and_whole`` its last prefix is all
    of it, unless the others reach the cut."""
    max_seq_len_from: Literal["end", "start"]
    """End of the response that ``max_seq_len`` keeps: the last tokens (``end``) or the first (``start``)."""
    metrics_dtype: Literal["float64", "bfloat16"]
    """``float64``; or ``bfloat16``: the effective, log effective and traditional rank of a whole response are rounded
    to 8 significant bits, as the paper's release stored them (301 becomes 300). Other metrics are never rounded."""
    zeroth_order_svd_method: SVDMethod
    """Spectrum of the whole response: ``full``; or ``lowrank``, only its ``svd_rank`` largest singular values."""
    diff_svd_method: SVDMethod
    """The same for the prefixes of velocity and acceleration. ``full`` is both exact and faster."""
    svd_rank: PositiveInt
    """Singular values that ``lowrank`` keeps, at least 1."""
    diff_calculator_method: Literal["optimized", "original"]
    """``optimized``: all prefixes at once, or eigenvalues of each prefix where that is cheaper; ``original``: a float64
    singular value decomposition of every prefix, slow, for comparison."""
    workspace_mb: PositiveInt
    """Bound on the memory for the spectra of one response, MiB, at least 1. vLLM leaves it free when it sizes the KV
    cache. Less takes more time: long responses are factored in blocks of fewer rows. Matrices of D x D alone may
    exceed it (docs/spectral.md, "Memory")."""
    on_nonfinite: Literal["raise", "mask", "zero"]
    """Treatment of a response whose hidden states hold NaN or infinity. ``raise``: end the run with an error that
    names the response and the layer. ``mask``: its metrics are NaN; it gets no signal, counts in no mean, and is
    counted in the log. ``zero``: its metrics are 0 and count like any other, as in the paper's release."""
    compute_global_metrics: bool
    """Log the metrics of the matrix of mean states, one per response of the batch ("global/<name>")."""
    compute_cumulative_global_metrics: bool
    """Log that matrix's velocity and acceleration over the responses ("cumulative/<name> diff")."""
    global_diff_stride_train: PositiveInt
    """Responses between two prefixes of ``compute_cumulative_global_metrics`` in training, at least 1."""
    global_diff_stride_val: PositiveInt
    """The same in validation."""
    keep_prefixes: bool
    """Also hand out the metrics of the prefixes, for ``trainer.samples.tokens``; unused in an evaluation."""

    def measured_by(self, source: str) -> bool:
        """Whether rank metrics are measured, and by ``source``: ``rollout`` or ``actor``."""
        return self.enable and (self.source == source or (self.compare_versions and source == "actor"))

    def check(self) -> None:
        fix = "source=actor measures under the policy that learns already; set source=rollout, or this to false"
        self.require(not self.compare_versions or self.source == "rollout", "compare_versions", fix)
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
        """Names of ``own_metrics``."""
        return [name_of(path) for path in self.own_metrics]

    @property
    def base_names(self) -> list[str]:
        """Names of the metrics of one response, in the order of ``metric_indices`` and ``own_metrics``."""
        return [*(BASE_METRICS[i] for i in self.metric_indices), *self.own_names]

    @property
    def metric_names(self) -> list[str]:
        """Every metric name the calculator returns, velocity and acceleration included."""
        suffixes = ["", " diff", " diff 2"] if self.compute_diff else [""]
        return [name + suffix for name in self.base_names for suffix in suffixes]

    @property
    def token_metrics(self) -> list[str]:
        """The metrics of tokens that are measured, as ``metric_indices_add`` has them."""
        return self.metric_indices_add if self.enable else []

    @property
    def needs_policy(self) -> bool:
        """Whether a metric of tokens is read from the policy's own forward pass."""
        return any(name != "avg_response_entropy" for name in self.token_metrics)
