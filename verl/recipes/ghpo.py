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
        """Configure the fractions to show, one per round, and the maximum number of ``rounds``.

        The last fraction also applies to all later rounds. For the other arguments, see :func:`with_hint`.
        """
        self.rounds = rounds
        self.shares = tuple(shares)
        self.text = text
        self.solution = solution

    def resample(self, batch: Batch, round: int) -> dict[int, PromptRecord]:
        """Return the unsolved prompts with hints, except prompts that would become too long."""
        edited: dict[int, PromptRecord] = {}
        unsolved = [(i, group) for i, group in enumerate(self.by_prompt(batch)) if not group.correct.any()]
        for place, responses in unsolved if round <= self.rounds else ():
            original = self.prompts[responses.records[0].uid]
            # A small fraction of a short solution can be empty, so use the first fraction that yields any text.
            for share in self.shares[min(round, len(self.shares)) - 1 :]:
                hinted = with_hint(self, original, share, self.solution, self.text)
                if hinted is not original:
                    edited[place] = hinted
                    break
        return edited
