"""GHPO (arXiv 2507.10628): resample unsolved prompts with a growing part of the solution as a hint.

As in its code, a hint is the beginning of the solution, measured in characters, and follows the question.
"""

from collections.abc import Sequence

from verl.batch import Batch
from verl.data.prompt_rows import PromptRecord
from verl.method import Method
from verl.recipes.common import HINT, with_hint


class GuidedHints(Method):
    """Adds 25, 50 and 75 % of the reference solution, a larger share in each round that leaves a prompt unsolved."""

    def __init__(
        self,
        shares: Sequence[float] = (0.25, 0.5, 0.75),
        text: str = HINT,
        solution: str = "solution",
        rounds: int = 3,
    ) -> None:
        """Configure the hints.

        Args:
            shares: of the solution, one per round; the last one applies to all later rounds.
            text: wording of a hint, with ``{hint}``.
            solution: key of the worked solution in ``extra_info``; the answer if there is none.
            rounds: maximum number of times that a prompt is sampled again.
        """
        self.rounds = rounds
        self.shares = tuple(shares)
        self.text = text
        self.solution = solution

    def resample(self, batch: Batch, round: int) -> dict[int, PromptRecord]:
        """Return the unsolved prompts with hints; prompts that would be too long are not resampled."""
        edited: dict[int, PromptRecord] = {}
        if round > self.rounds:
            return edited
        # A small share of a short solution can be empty; use the first share that is not.
        shares = self.shares[min(round, len(self.shares)) - 1 :]
        for place, responses in enumerate(self.by_prompt(batch)):
            if responses.correct.any():
                continue
            original = self.prompts[responses.records[0].uid]
            for share in shares:
                hinted = with_hint(self, original, share, self.solution, self.text)
                if hinted is not original:
                    edited[place] = hinted
                    break
        return edited
