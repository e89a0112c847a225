"""GHPO (arXiv 2507.10628): prompts that no response solves are sampled again with a growing part of the solution.

As in its code, the part is one of the solution's characters, and follows the question in the wording of ``text``.
"""

from collections.abc import Sequence

from verl.batch import Batch
from verl.data.prompt_rows import PromptRecord
from verl.method import Method

WORDING = "\n The following text is the beginning part of the answer, which you can refer to for solving the problem:\n"


class GuidedHints(Method):
    """Adds 25, 50 and 75 % of the reference solution, a larger share in each round that leaves a prompt unsolved."""

    def __init__(
        self,
        shares: Sequence[float] = (0.25, 0.5, 0.75),
        text: str = WORDING + "{hint}",
        solution: str = "solution",
        rounds: int = 3,
    ) -> None:
        """Set the hints.

        Args:
            solution: the key of the worked solution in ``extra_info``; without one, the answer takes its place.
            rounds: how often a prompt is sampled again at most.
        """
        self.rounds = rounds
        self.shares = tuple(shares)
        self.text = text
        self.solution = solution

    def resample(self, batch: Batch, round: int) -> dict[int, PromptRecord]:
        """Return the unsolved prompts with their hints; one that would be too long keeps its first responses."""
        edited: dict[int, PromptRecord] = {}
        if round > self.rounds:
            return edited
        shares = self.shares[min(round, len(self.shares)) - 1 :]
        for place, responses in enumerate(self.by_prompt(batch)):
            original = self.prompts[responses.records[0].uid]
            # Of a short solution, a small share is nothing: the first that is something.
            parts = [hint(self._solution_of(original), share) for share in shares]
            part = next(filter(None, parts), "")
            if responses.correct.any() or not part:
                continue
            text = str(original.messages[-1]["content"]) + self.text.format(hint=part)
            hinted = self.edit_prompt(original, text)
            if len(hinted.input_ids) <= self.config.data.max_prompt_length:
                edited[place] = hinted
        return edited

    def _solution_of(self, record: PromptRecord) -> str:
        return str(record.extra_info.get(self.solution) or record.ground_truth)


def hint(solution: str, share: float) -> str:
    """Return the first ``share`` of a solution's characters."""
    return solution[: round(len(solution) * share)]
