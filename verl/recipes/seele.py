"""SEELE (arXiv 2509.06923): adjust hints so that the policy solves a prompt about half of the time.

A prompt is sampled in several rounds, each with a different share of its solution as a hint; all rounds form one group.
From the second round on, the three-parameter logistic curve of item response theory is fitted to the accuracy of the
previous rounds,

    f(share) = c + (1 - c) / (1 + exp(-a (share - b)))

and the next share is the one with f = 0.5, or 0 if the policy does not need a hint.

Assumed, since only an outline is public: the first round has no hint, and the second round has half of the solution if
less than half of the first responses were correct. The curve is fitted by least squares on a grid, with a from 1 to 64
and b and c from 0 to 1. Hints have GHPO's wording. Not implemented: the loss that trains on the hint itself.
"""

from collections.abc import Sequence

import torch

from verl.batch import Batch
from verl.config.errors import ConfigError
from verl.data.prompt_rows import PromptRecord
from verl.method import Method
from verl.recipes.common import with_hint

SLOPES = 2.0 ** torch.arange(0, 6.5, 0.5, dtype=torch.float64)
GRID = torch.linspace(0, 1, 51, dtype=torch.float64)


class Sweet(Method):
    """Samples ``num_prompts // rounds`` prompts in rounds of ``rollout.n`` responses each."""

    def __init__(self, rounds: int = 4, solution: str = "solution") -> None:
        """``solution``: key of the worked solution in ``extra_info``; the answer if there is none."""
        self.rounds = rounds
        self.solution = solution
        if self.config.algorithm.filter_groups.enable:
            raise ConfigError("algorithm.filter_groups.enable=True: SEELE samples one batch a step; set it to false")
        if not 2 <= rounds <= 7:
            raise ConfigError(f"trainer.method_kwargs.rounds={rounds}: must be from 2 to 7")
        self.sampled: list[Batch] = []
        """Finished rounds of the step in progress."""
        self.shares: list[list[float]] = []
        """Shares of each prompt, one per round."""

    def choose_prompts(self, candidates: list[PromptRecord]) -> list[PromptRecord]:
        """Choose as many prompts as fill a batch with all their rounds."""
        chosen = candidates[: max(1, self.num_prompts // self.rounds)]
        self.sampled, self.shares = [], [[0.0] for _ in chosen]
        return chosen

    def resample(self, batch: Batch, round: int) -> dict[int, PromptRecord]:
        """Return every prompt with its next hint; none after the last round."""
        self.sampled.append(batch.columns(*batch.names))  # the trainer adds columns to the last batch
        if round >= self.rounds:
            return {}
        # The next hint of each prompt follows from its accuracy in all rounds so far.
        accuracies = [part.correct.view(len(self.shares), -1).double().mean(dim=1).tolist() for part in self.sampled]
        edited = {}
        for place, (shares, accuracy) in enumerate(zip(self.shares, zip(*accuracies, strict=True), strict=True)):
            record = self.prompts[batch.records[place * self.config.rollout.n].uid]
            shares.append(next_share(shares, accuracy))
            edited[place] = with_hint(self, record, shares[-1], self.solution)
        return edited

    def learn_from(self, batch: Batch) -> Batch:
        """Return all rounds, with those of a prompt as one group."""
        place = torch.arange(len(self.shares)).repeat_interleave(self.config.rollout.n)
        rounds = [sampled.fill(group=(self.step << 32) + place, step=batch.step) for sampled in self.sampled]
        self.sampled = []
        order = place.repeat(len(rounds)).argsort(stable=True)
        return Batch.join(rounds)[order]


def next_share(shares: Sequence[float], accuracy: Sequence[float]) -> float:
    """Return the share of the solution, 0 to 1, at which half of the responses should be correct."""
    if len(shares) == 1:
        return 0.0 if accuracy[0] >= 0.5 else 0.5
    a, b, c = fitted(shares, accuracy)
    if c >= 0.5:
        return 0.0
    return min(1.0, max(0.0, b + float(torch.logit(torch.tensor((0.5 - c) / (1 - c), dtype=torch.float64))) / a))


def fitted(shares: Sequence[float], accuracy: Sequence[float]) -> tuple[float, float, float]:
    """Return a, b and c of the curve with the smallest squared error; ties go to the flattest curve."""
    a, b, c = (axis.flatten() for axis in torch.meshgrid(SLOPES, GRID, GRID, indexing="ij"))
    share, target = (torch.tensor(values, dtype=torch.float64)[:, None] for values in (shares, accuracy))
    curve = c + (1 - c) * torch.sigmoid(a * (share - b))
    best = int(((curve - target) ** 2).sum(dim=0).argmin())
    return float(a[best]), float(b[best]), float(c[best])
