"""DRIVE's second stage (arXiv 2511.06307): 64 responses to each of the hardest prompts, which stay in training.

Of k m candidates the m are sampled of which the smallest share of responses was correct when they were sampled last.
Assumed: a prompt that was never sampled comes first, so that all are tried once; the authors retain the hardest of a
small set in phases. Their first stage is GRPO with 8 responses to prompts of all difficulties: ``experiment=grpo
rollout.n=8``, whose model this one starts from.
"""

from collections.abc import Mapping
from typing import Any

from verl.data.samplers import StepOutcome
from verl.data.selectors import Candidates


class HardFocus:
    """Selects the hardest prompts; checkpoints hold how each went."""

    def __init__(self) -> None:
        self.accuracy: dict[str, float] = {}
        """By ``uid``, the share of correct responses, 0 to 1."""

    def select(self, candidates: Candidates) -> list[int]:
        """Those that were never sampled, then by their accuracy; the first of those that are alike."""
        known = [self.accuracy.get(str(record.uid), -1.0) for record in candidates.records]
        return sorted(range(len(known)), key=known.__getitem__)[: candidates.num_chosen]

    def update(self, outcome: StepOutcome) -> None:
        """Remember how the step's prompts went."""
        self.accuracy |= {str(uid): found for uid, found in zip(outcome.indices, outcome.accuracy, strict=True)}

    def state_dict(self) -> dict[str, Any]:
        """The accuracies."""
        return {"accuracy": self.accuracy}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore them."""
        self.accuracy = state["accuracy"]
