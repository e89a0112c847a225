"""Inputs and outputs of the analysis worker. This module has no heavy imports."""

from dataclasses import dataclass

ALONG = ("logprob", "entropy", "state_speed", "state_dispersion")
"""Metrics that are computed for prefixes in addition to rank metrics."""


@dataclass(frozen=True)
class PromptResponses:
    """A prompt and responses whose hidden states are measured."""

    key: int
    """Identifier of the prompt, chosen by the caller."""
    prompt_ids: list[int]
    token_ids: list[list[int]]
    """Token ids of each response. Responses must not be empty."""


@dataclass(frozen=True)
class PrefixMetrics:
    """Metrics of the prefixes of one response."""

    ends: list[int]
    """Lengths of the measured prefixes. The last prefix is the whole response."""
    values: dict[str, list[float]]
    """Maps metric names to one value per prefix. The metrics are rank metrics, ``state_speed``, ``state_dispersion``,
    and the means of ``logprob`` and ``entropy`` since the previous prefix."""


@dataclass(frozen=True)
class MeasuredPrompt:
    """Metrics of the responses to one prompt, computed by a policy."""

    key: int
    responses: list[dict[str, list[float]]]
    """Metric values by name for each response. ``avg_log_probs`` and ``avg_logits_entropy`` have one value, and all
    other metrics have one value per layer."""
    stack: dict[str, list[float]]
    """Rank metrics of the stacked states of all responses, with one value per layer."""
    distances: dict[str, float]
    """Maps names to distances between the responses' mean hidden states."""
    courses: list[PrefixMetrics]
