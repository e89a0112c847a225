"""Second stage of DRIVE (arXiv 2511.06307): train on the hardest prompts, with 64 responses per prompt.

From k * m candidates, choose the m prompts that had the lowest fraction of correct responses when last sampled. We
assume that prompts not sampled before have mean difficulty, so the choice is nearly arbitrary in the first epoch. The
authors instead reduce a small set to its hardest prompts in phases. Start this stage from the model trained in the
first stage: GRPO on prompts of all difficulties with 8 responses each (``experiment=grpo rollout.n=8``).
"""

import statistics

from verl.data.prompt_record import PromptRecord
from verl.method import StepOutcome
from verl.recipes.common import Saving


class HardFocus(Saving):
    """Method that selects the hardest prompts; the accuracy of each prompt is saved in checkpoints."""

    saved = ("accuracy",)

    def __init__(self, candidates: int = 4) -> None:
        """Configure k, the number of ``candidates`` per prompt."""
        self.candidates_per_prompt = candidates
        self.accuracy: dict[str, float] = {}
        """Fraction of correct responses, from 0 to 1, by the ``uid`` of the prompt."""

    def choose_prompts(self, candidates: list[PromptRecord]) -> list[PromptRecord]:
        """Choose the hardest candidates; ties are broken in favor of earlier candidates."""
        mean = statistics.fmean(self.accuracy.values()) if self.accuracy else 0.0
        return sorted(candidates, key=lambda record: self.accuracy.get(str(record.uid), mean))[: self.num_prompts]

    def after_step(self, outcome: StepOutcome) -> None:
        """Store the accuracy of the step's prompts."""
        self.accuracy |= zip(map(str, outcome.indices), outcome.accuracy, strict=True)
