"""Adaptive DAPO from CodeV-R1 (arXiv 2505.24183): dynamic sampling of only as many prompts as are likely to be needed.

As in the authors' code, the next generation batch in a step contains at least

    missing / min(ratio, part)

prompts, where ``missing`` is the number of informative groups still needed, ``ratio`` is the lowest fraction of
informative groups in any step that filled its batch, and ``part`` is the lowest fraction in any generation batch of
this step. Both fractions start at 1. We assume that a group is informative if some but not all of its responses are
correct (``algorithm.filter_groups.metric=acc``). A generation batch contains at most ``data.gen_batch_size`` prompts.
Unused candidates are skipped until the next epoch.
"""

import math

from verl.batch import Batch
from verl.data.prompt_record import PromptRecord
from verl.method import StepOutcome
from verl.recipes.common import Saving


class AdaptiveBatches(Saving):
    """Method that adapts the size of generation batches."""

    saved = ("ratio",)

    def __init__(self) -> None:
        self.ratio = 1.0
        self._begin_step()

    def _begin_step(self) -> None:
        self.part, self.kept, self.generated = 1.0, 0, 0

    def choose_prompts(self, candidates: list[PromptRecord]) -> list[PromptRecord]:
        """Choose as many of the first candidates as the step is expected to need."""
        share = min(self.ratio, self.part)
        missing = self.config.data.train_batch_size - self.kept
        return candidates[: math.ceil(missing / share)] if share else candidates

    def resample(self, batch: Batch, round: int) -> dict[int, PromptRecord]:
        """Count the informative groups without resampling any prompt."""
        groups = self.by_prompt(batch)
        kept = sum(0 < int(group.correct.sum()) < len(group) for group in groups)
        self.kept, self.generated = self.kept + kept, self.generated + len(groups)
        self.part = min(self.part, kept / len(groups))
        return {}

    def after_step(self, outcome: StepOutcome) -> None:
        """Update the fraction of informative groups."""
        if self.kept >= self.config.data.train_batch_size:
            self.ratio = min(self.ratio, self.kept / self.generated)
        self._begin_step()
