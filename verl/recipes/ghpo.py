"""GHPO (arXiv 2507.10628): resample unsolved prompts with a growing part of the solution as a hint.

As in the authors' code, the hint is a prefix of the solution, measured in characters, and is placed after the question.
"""

from collections.abc import Sequence

from verl.batch import Batch
from verl.data.prompt_record import PromptRecord
from verl.method import Method
from verl.recipes.common import HINT, with_hint


class GuidedHints(Method):
    """Method that shows 25%, then 50%, then 75% of the reference solution while a prompt remains unsolved."""

    def __init__(
        self,
        shares: Sequence[float] = (0.25, 0.5, 0.75),
        text: str = HINT,
        solution: str = "solution",
        rounds: int = 3,
    ) -> None:
        """Configure the hints.

        Args:
            shares: Fractions of the solution to show, one per round; the last one also applies to all later rounds.
            text: Template of the hint; must contain ``{hint}``.
            solution: Key of the worked solution in ``extra_info``; prompts without it use the ground truth.
            rounds: Maximum number of times that a prompt is resampled.
        """
        self.rounds = rounds
        self.shares = tuple(shares)
        self.text = text
        self.solution = solution

    def resample(self, batch: Batch, round: int) -> dict[int, PromptRecord]:
        """Return the unsolved prompts with hints, except those that would become too long."""
        edited: dict[int, PromptRecord] = {}
        if round > self.rounds:
            return edited
        # A small fraction of a short solution can be empty, so use the first fraction that yields any text.
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
