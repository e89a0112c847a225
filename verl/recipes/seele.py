"""SEELE (arXiv 2509.06923): adjust hints so that the policy solves each prompt about half of the time.

Each prompt is sampled in several rounds with different fractions of its solution as a hint. The responses from all
rounds form one group. From the third round on, the three-parameter logistic curve from item response theory is fitted
to the accuracy of the previous rounds,

    f(share) = c + (1 - c) / (1 + exp(-a (share - b)))

and the next share is chosen so that f = 0.5. If the policy does not need a hint, the share is 0.

Only an outline is public. We assume that the first round has no hint and that the second round shows half of the
solution if less than half of the first responses were correct. The curve is fitted by least squares on a grid, with a
from 1 to 64 and both b and c from 0 to 1. Hints use GHPO's template. The loss for training on hints is not implemented.
"""

from collections.abc import Sequence

import torch

from verl.batch import Batch
from verl.config.checks import require
from verl.data.prompt_record import PromptRecord
from verl.method import Method
from verl.recipes.common import with_hint

SLOPES = 2.0 ** torch.arange(0, 6.5, 0.5, dtype=torch.float64)
GRID = torch.linspace(0, 1, 51, dtype=torch.float64)


class Sweet(Method):
    """Method that samples ``num_prompts // rounds`` prompts in rounds of ``rollout.n`` responses per prompt."""

    def __init__(self, rounds: int = 4, solution: str = "solution") -> None:
        """Configure the method; ``solution`` is the key of the worked solution in ``extra_info``, if there is one."""
        self.rounds = rounds
        self.solution = solution
        filters, fix = self.config.algorithm.filter_groups.enable, "SEELE samples one batch a step; set it to false"
        require(not filters, "algorithm.filter_groups.enable", filters, fix)
        require(2 <= rounds <= 7, "trainer.method_kwargs.rounds", rounds, "must be from 2 to 7")
        self.sampled: list[Batch] = []
        """Finished rounds of the current step."""
        self.shares: list[list[float]] = []
        """Fractions of the solution shown for each prompt, one per round."""

    def choose_prompts(self, candidates: list[PromptRecord]) -> list[PromptRecord]:
        """Choose as many prompts as fit into a batch when sampled in all rounds."""
        chosen = candidates[: max(1, self.num_prompts // self.rounds)]
        self.sampled, self.shares = [], [[0.0] for _ in chosen]
        return chosen

    def resample(self, batch: Batch, round: int) -> dict[int, PromptRecord]:
        """Return all prompts with their next hints, or no prompts after the last round."""
        self.sampled.append(batch.columns(*batch.names))  # the trainer adds columns to the last batch
        if round >= self.rounds:
            return {}
        # Compute the next hint of each prompt from its accuracy in all rounds so far.
        accuracies = [part.correct.view(len(self.shares), -1).double().mean(dim=1).tolist() for part in self.sampled]
        edited = {}
        for place, (shares, accuracy) in enumerate(zip(self.shares, zip(*accuracies, strict=True), strict=True)):
            record = self.prompts[batch.records[place * self.config.rollout.n].uid]
            shares.append(next_share(shares, accuracy))
            edited[place] = with_hint(self, record, shares[-1], self.solution)
        return edited

    def learn_from(self, batch: Batch) -> Batch:
        """Return the responses from all rounds, with one group per prompt."""
        place = torch.arange(len(self.shares)).repeat_interleave(self.config.rollout.n)
        rounds = [sampled.fill(group=(self.step << 32) + place, step=batch.step) for sampled in self.sampled]
        self.sampled = []
        order = place.repeat(len(rounds)).argsort(stable=True)
        return Batch.join(rounds)[order]


def next_share(shares: Sequence[float], accuracy: Sequence[float]) -> float:
    """Return the fraction of the solution, from 0 to 1, at which half of the responses are expected to be correct."""
    if len(shares) == 1:
        return 0.0 if accuracy[0] >= 0.5 else 0.5
    a, b, c = fitted(shares, accuracy)
    if c >= 0.5:
        return 0.0
    return min(1.0, max(0.0, b + float(torch.logit(torch.tensor((0.5 - c) / (1 - c), dtype=torch.float64))) / a))


def fitted(shares: Sequence[float], accuracy: Sequence[float]) -> tuple[float, float, float]:
    """Return a, b and c of the curve with the smallest squared error; ties are broken in favor of flatter curves."""
    a, b, c = (axis.flatten() for axis in torch.meshgrid(SLOPES, GRID, GRID, indexing="ij"))
    share, target = (torch.tensor(values, dtype=torch.float64)[:, None] for values in (shares, accuracy))
    curve = c + (1 - c) * torch.sigmoid(a * (share - b))
    best = int(((curve - target) ** 2).sum(dim=0).argmin())
    return float(a[best]), float(b[best]), float(c[best])
