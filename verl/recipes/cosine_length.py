"""Cosine length reward from Open-RS (arXiv 2503.16219), as in the authors' code.

    reward = long + (short - long) (1 + cos(pi length / longest)) / 2

A correct response earns ``short`` = 1 at length 0 and ``long`` = 0.5 at the maximum length. A wrong response earns -1
and -0.5. The reward favors short correct responses and long wrong ones. We assume that lengths are in tokens (the code
counts characters) and that ``longest`` is ``data.max_response_length``. We omit the code's reward for thought tags.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from verl.batch import Batch
from verl.method import Method


class CosineLength(Method):
    """Cosine reward, where ``correct`` and ``wrong`` each contain the rewards at length 0 and at the maximum length."""

    def __init__(self, correct: Sequence[float] = (1.0, 0.5), wrong: Sequence[float] = (-1.0, -0.5)) -> None:
        self.correct, self.wrong = tuple(correct), tuple(wrong)

    def shape_rewards(self, batch: Batch, rewards: Tensor) -> Tensor:
        """Return the cosine rewards, [B], which replace the reward model's scores and the overlong penalty."""
        ends = torch.tensor([self.wrong, self.correct], dtype=torch.float64)[batch.correct.long()]
        short, long = ends.unbind(dim=1)
        share = batch.response_lengths.double() / self.max_response_length
        return long + (short - long) * (1 + torch.cos(math.pi * share)) / 2
