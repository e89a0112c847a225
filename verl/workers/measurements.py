"""Inputs and outputs of the analysis worker; this module has no heavy imports."""

from dataclasses import dataclass

ALONG = ("logprob", "entropy", "state_speed", "state_dispersion")
"""Metrics of prefixes other than rank metrics."""


@dataclass(frozen=True)
class PromptResponses:
    """A prompt with responses whose hidden states a policy measures."""

    key: int
    """Identifier of the prompt chosen by the caller."""
    prompt_ids: list[int]
    token_ids: list[list[int]]
    """Tokens of each response, at least one per response."""


@dataclass(frozen=True)
class PrefixMetrics:
    """Metrics of the prefixes of one response."""

    ends: list[int]
    """Prefix lengths at which rank metrics were measured, ending with the whole response."""
    values: dict[str, list[float]]
    """Rank metrics, ``state_speed`` and ``state_dispersion`` of each prefix by name, and ``logprob`` and ``entropy``,
    averaged over the tokens since the previous prefix."""


@dataclass(frozen=True)
class MeasuredPrompt:
    """Metrics that a policy computed for the responses to one prompt."""

    key: int
    responses: list[dict[str, list[float]]]
    """Metrics of each response by name, with one value per layer, except that ``avg_log_probs`` and
    ``avg_logits_entropy`` have one value."""
    stack: dict[str, list[float]]
    """Rank metrics of the stacked states of all responses, with one value per layer."""
    distances: dict[str, float]
    """Distances between the mean states of the responses, by name."""
    courses: list[PrefixMetrics]
