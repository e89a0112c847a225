"""Adaptive DAPO of CodeV-R1 (arXiv 2505.24183): dynamic sampling generates only as many prompts as it expects to need.

As in its code, the next generation batch of a step has at least

    missing / min(ratio, part)

prompts, where ``missing`` is the number of informative groups still needed, ``ratio`` the smallest share of informative
groups in any step that filled its batch, and ``part`` the smallest share in any generation batch of this step. Both
shares start at 1. Assumed: a group is informative if some but not all of its responses are correct
(``algorithm.filter_groups.metric=acc``). A generation batch has at most ``data.gen_batch_size`` prompts; the others are
skipped until the next epoch.
"""

import math
from typing import Any

from verl.batch import Batch
from verl.data.prompt_rows import PromptRecord
from verl.method import Method, StepOutcome


class AdaptiveBatches(Method):
    """Adapts the size of generation batches; checkpoints hold ``ratio``."""

    def __init__(self) -> None:
        self.ratio = 1.0
        self._begin_step()

    def _begin_step(self) -> None:
        self.part, self.kept, self.generated = 1.0, 0, 0

    def choose_prompts(self, candidates: list[PromptRecord]) -> list[PromptRecord]:
        """Choose the first candidates, as many as the step is expected to need."""
        share = min(self.ratio, self.part)
        missing = self.config.data.train_batch_size - self.kept
        return candidates[: math.ceil(missing / share)] if share else candidates

    def resample(self, batch: Batch, round: int) -> dict[int, PromptRecord]:
        """Count the informative groups; no prompt is edited."""
        groups = self.by_prompt(batch)
        kept = sum(0 < int(group.correct.sum()) < len(group) for group in groups)
        self.kept, self.generated = self.kept + kept, self.generated + len(groups)
        self.part = min(self.part, kept / len(groups))
        return {}

    def after_step(self, outcome: StepOutcome) -> None:
        """Update the share of informative groups."""
        if self.kept >= self.config.data.train_batch_size:
            self.ratio = min(self.ratio, self.kept / self.generated)
        self._begin_step()

    def state_dict(self) -> dict[str, Any]:
        return {"ratio": self.ratio}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.ratio = state["ratio"]
