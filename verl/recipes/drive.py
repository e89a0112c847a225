"""DRIVE's second stage (arXiv 2511.06307): train on the hardest prompts, with 64 responses each.

Of k m candidates, choose the m prompts with the lowest share of correct responses when they were last sampled. Assumed:
prompts that were never sampled have mean difficulty, so the choice is nearly arbitrary in the first epoch; the authors
retain the hardest prompts of a small set in phases. The first stage, whose model this stage starts from, is GRPO with 8
responses to prompts of all difficulties: ``experiment=grpo rollout.n=8``.
"""

import statistics
from collections.abc import Mapping
from typing import Any

from verl.data.prompt_rows import PromptRecord
from verl.method import Method, StepOutcome


class HardFocus(Method):
    """Selects the hardest prompts; checkpoints hold the accuracy of each."""

    def __init__(self, candidates: int = 4) -> None:
        """``candidates``: k."""
        self.candidates_per_prompt = candidates
        self.accuracy: dict[str, float] = {}
        """``uid`` -> share of correct responses, 0 to 1."""

    def choose_prompts(self, candidates: list[PromptRecord]) -> list[PromptRecord]:
        """Choose the hardest candidates; ties go to the first."""
        mean = statistics.fmean(self.accuracy.values()) if self.accuracy else 0.0
        return sorted(candidates, key=lambda record: self.accuracy.get(str(record.uid), mean))[: self.num_prompts]

    def after_step(self, outcome: StepOutcome) -> None:
        """Store the accuracy of the step's prompts."""
        self.accuracy |= zip(map(str, outcome.indices), outcome.accuracy, strict=True)

    def state_dict(self) -> dict[str, Any]:
        return {"accuracy": self.accuracy}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.accuracy = state["accuracy"]
