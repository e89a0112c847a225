"""Responses that the analysis worker reads, and its metrics of them. Imports nothing heavy."""

from dataclasses import dataclass


@dataclass(frozen=True)
class PromptResponses:
    """A prompt and the responses to it, to be read by a policy."""

    key: int
    """The caller's name for the prompt."""
    prompt_ids: list[int]
    token_ids: list[list[int]]
    """Of each response, at least one token."""


@dataclass(frozen=True)
class PrefixMetrics:
    """Metrics along one response."""

    ends: list[int]
    """Tokens after which rank metrics were measured; the whole response last."""
    values: dict[str, list[float]]
    """Rank metric of each of these prefixes by name; ``logprob`` and ``entropy``, means of the tokens since the prefix
    before."""


@dataclass(frozen=True)
class MeasuredPrompt:
    """A policy's metrics of the responses to a prompt."""

    key: int
    responses: list[dict[str, list[float]]]
    """Of each response, metrics by name, one value for each layer; of ``avg_log_probs`` and ``avg_logits_entropy`` one
    value."""
    stack: dict[str, list[float]]
    """Rank metrics of all responses stacked, one value for each layer."""
    distances: dict[str, float]
    """Of the mean states."""
    courses: list[PrefixMetrics]
