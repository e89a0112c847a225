"""SEELE (arXiv 2509.06923): hints as long as leaves the policy right half of the time.

A prompt is sampled in rounds, each with another share of its solution as a hint, and all rounds make one group. From
the second round on, the three-parameter logistic curve of item response theory is fitted to the accuracy of the rounds
so far,

    f(share) = c + (1 - c) / (1 + exp(-a (share - b)))

and the next share is the one with f = 0.5, or 0 if the policy needs no hint. Assumed, as the public text has the
outline alone: the first round has no hint, and the second, if less than half of the first were right, half of the
solution; the fit is by least squares on a grid with a from 1 to 64 and b and c from 0 to 1; hints are worded as in
GHPO. Left out: the loss by which the hint itself is learned.
"""

from collections.abc import Sequence

import torch

from verl.batch import Batch
from verl.config.errors import ConfigError
from verl.data.prompt_rows import PromptRecord
from verl.recipes.ghpo import GuidedHints, hint

SLOPES = 2.0 ** torch.arange(0, 6.5, 0.5, dtype=torch.float64)
GRID = torch.linspace(0, 1, 51, dtype=torch.float64)


class Sweet(GuidedHints):
    """``rounds`` of ``rollout.n`` responses to each of ``num_prompts // rounds`` prompts."""

    def __init__(self, rounds: int = 4, solution: str = "solution") -> None:
        """``solution``: the key of the worked solution in ``extra_info``; without one, the answer takes its place."""
        super().__init__(rounds=rounds, solution=solution)
        if self.config.algorithm.filter_groups.enable:
            raise ConfigError("algorithm.filter_groups.enable=True: SEELE samples one batch a step; set it to false")
        if not 2 <= rounds <= 7:
            raise ConfigError(f"trainer.method_kwargs.rounds={rounds}: must be from 2 to 7")
        self.sampled: list[Batch] = []
        """The rounds of the step in progress."""
        self.shares_of: list[list[float]] = []
        """By prompt, the share of each round."""

    def choose_prompts(self, candidates: list[PromptRecord]) -> list[PromptRecord]:
        """So many that all rounds together make a batch."""
        chosen = candidates[: max(1, self.num_prompts // self.rounds)]
        self.sampled, self.shares_of = [], [[0.0] for _ in chosen]
        return chosen

    def resample(self, batch: Batch, round: int) -> dict[int, PromptRecord]:
        """Every prompt with its next hint, until all rounds are sampled."""
        self.sampled.append(batch.columns(*batch.names))  # the trainer adds to the last batch
        if round >= self.rounds:
            return {}
        accuracy = torch.stack(
            [sampled.correct.view(len(self.shares_of), -1).double().mean(dim=1) for sampled in self.sampled]
        )
        edited = {}
        for place, (shares, found) in enumerate(zip(self.shares_of, accuracy.T.tolist(), strict=True)):
            record = self.prompts[batch.records[place * self.config.rollout.n].uid]
            shares.append(next_share(shares, found))
            edited[place] = self._hinted(record, shares[-1])
        return edited

    def _hinted(self, record: PromptRecord, share: float) -> PromptRecord:
        """Return the prompt with its hint; without it if the hint is empty or does not fit."""
        part = hint(self._solution_of(record), share)
        text = str(record.messages[-1]["content"]) + self.text.format(hint=part)
        hinted = self.edit_prompt(record, text) if part else record
        return hinted if len(hinted.input_ids) <= self.config.data.max_prompt_length else record

    def learn_from(self, batch: Batch) -> Batch:
        """All rounds, those of a prompt as one group."""
        place = torch.arange(len(self.shares_of)).repeat_interleave(self.config.rollout.n)
        rounds = [sampled.fill(group=(self.step << 32) + place, step=batch.step) for sampled in self.sampled]
        self.sampled = []
        order = place.repeat(len(rounds)).argsort(stable=True)
        return Batch.join(rounds)[order]


def next_share(shares: Sequence[float], accuracy: Sequence[float]) -> float:
    """Return the share of the solution, 0 to 1, at which half of the responses should be right, by earlier rounds."""
    if len(shares) == 1:
        return 0.0 if accuracy[0] >= 0.5 else 0.5
    a, b, c = fitted(shares, accuracy)
    if c >= 0.5:
        return 0.0
    return min(1.0, max(0.0, b + float(torch.logit(torch.tensor((0.5 - c) / (1 - c), dtype=torch.float64))) / a))


def fitted(shares: Sequence[float], accuracy: Sequence[float]) -> tuple[float, float, float]:
    """Return a, b and c of the curve with the smallest sum of squares; of equals, the flattest."""
    a, b, c = (axis.flatten() for axis in torch.meshgrid(SLOPES, GRID, GRID, indexing="ij"))
    at, found = (torch.tensor(values, dtype=torch.float64)[:, None] for values in (shares, accuracy))
    curve = c + (1 - c) * torch.sigmoid(a * (at - b))
    best = int(((curve - found) ** 2).sum(dim=0).argmin())
    return float(a[best]), float(b[best]), float(c[best])
