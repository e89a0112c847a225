"""The cosine length reward of Open-RS (arXiv 2503.16219), as in its code.

    reward = long + (short - long) (1 + cos(pi length / longest)) / 2

A correct response earns ``short`` = 1 as its length goes to 0 and ``long`` = 0.5 at the longest, a wrong one -1 and
-0.5: correct ones are to be short, and wrong ones to go on trying. Assumed: lengths are counted in tokens (the code
counts characters), and the longest is ``data.max_response_length``. Left out: the reward for tags of thoughts that the
code adds.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from verl.batch import Batch
from verl.method import Method


class CosineLength(Method):
    """Rewards correctness and length; ``correct`` and ``wrong`` are the rewards at length 0 and at the longest."""

    def __init__(self, correct: Sequence[float] = (1.0, 0.5), wrong: Sequence[float] = (-1.0, -0.5)) -> None:
        self.correct, self.wrong = tuple(correct), tuple(wrong)

    def shape_rewards(self, batch: Batch, rewards: Tensor) -> Tensor:
        """[B]; reward model and overlong penalty, which it has no place for, are dropped."""
        ends = torch.tensor([self.wrong, self.correct], dtype=torch.float64)[batch.correct.long()]
        short, long = ends.unbind(dim=1)
        share = batch.response_lengths.double() / self.max_response_length
        return long + (short - long) * (1 + torch.cos(math.pi * share)) / 2
