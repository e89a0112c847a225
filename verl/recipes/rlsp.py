"""RLSP (arXiv 2502.06773): an exploration reward in addition to the outcome reward.

    reward = alpha * (1 if correct else 0) + (1 - alpha) * (1 - gamma^length)

The paper rewards exploration in correct and wrong responses; a reward for more steps before the answer is enough.
Assumed, because its exact form could not be read: the reward grows with the number of tokens and saturates, and alpha
is 0.8. Truncated responses get no exploration reward, otherwise the best policy would never stop.
"""

import torch
from torch import Tensor

from verl.batch import Batch
from verl.method import Method


class Exploring(Method):
    """Adds the exploration reward, which is 1/2 at ``half_share`` of the maximum length."""

    def __init__(self, alpha: float, half_share: float) -> None:
        self.alpha, self.half_share = alpha, half_share

    def shape_rewards(self, batch: Batch, rewards: Tensor) -> Tensor:
        """Return the weighted sum of both rewards, [B]."""
        effort = 1 - 0.5 ** (batch.response_lengths.double() / (self.half_share * self.max_response_length))
        effort = torch.where(batch.truncated, 0.0, effort)
        return self.alpha * batch.correct.double() + (1 - self.alpha) * effort
