"""DRIVE's second stage (arXiv 2511.06307): 64 responses to each of the hardest prompts, which stay in training.

Of k m candidates the m with the smallest share of correct responses are chosen, as it was when they were last sampled.
Assumed: a prompt that was never sampled counts as one of mean difficulty, so in the first pass over the data the choice
is nearly free; the authors retain the hardest prompts of a small set in phases. Their first stage is GRPO with 8
responses to prompts of all difficulties: ``experiment=grpo rollout.n=8``, whose model this one starts from.
"""

import statistics
from collections.abc import Mapping
from typing import Any

from verl.data.prompt_rows import PromptRecord
from verl.method import Method, StepOutcome


class HardFocus(Method):
    """Selects the hardest prompts; checkpoints hold how each went."""

    def __init__(self, candidates: int = 4) -> None:
        """``candidates``: k."""
        self.candidates_per_prompt = candidates
        self.accuracy: dict[str, float] = {}
        """By ``uid``, the share of correct responses, 0 to 1."""

    def choose_prompts(self, candidates: list[PromptRecord]) -> list[PromptRecord]:
        """Choose the hardest candidates; of equal ones the first."""
        mean = statistics.fmean(self.accuracy.values()) if self.accuracy else 0.0
        return sorted(candidates, key=lambda record: self.accuracy.get(str(record.uid), mean))[: self.num_prompts]

    def after_step(self, outcome: StepOutcome) -> None:
        """Remember how the step's prompts went."""
        self.accuracy |= {str(uid): found for uid, found in zip(outcome.indices, outcome.accuracy, strict=True)}

    def state_dict(self) -> dict[str, Any]:
        """Return the accuracies."""
        return {"accuracy": self.accuracy}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore them."""
        self.accuracy = state["accuracy"]
