"""What a function of ``rollout.schedule`` is asked: how the responses of a step are sampled.

Legend: G prompts, n responses to each, T positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from verl.config.rollout import SamplingConfig
from verl.data.prompt_rows import PromptRecord


@dataclass(frozen=True)
class SamplingRequest:
    """Responses that are about to be sampled in training."""

    step: int
    """From 1."""
    total_steps: int
    records: Sequence[PromptRecord]
    """G, the prompts as they are sampled."""
    n: int
    """Responses to each."""
    base: SamplingConfig
    """The options of ``rollout``, which hold where nothing else is said."""
    max_response_length: int
    """The most tokens of a response."""
