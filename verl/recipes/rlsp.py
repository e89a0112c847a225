"""RLSP (arXiv 2502.06773): add an exploration reward to the outcome reward.

    reward = alpha * (1 if correct else 0) + (1 - alpha) * (1 - gamma^length)

The paper rewards exploration in both correct and wrong responses. It is enough to reward additional steps before the
answer. The exact formula was not available, so we assume that the reward grows with the number of tokens and saturates,
and that alpha is 0.8. Truncated responses earn no exploration reward; otherwise, the best policy would never stop.
"""

import torch
from torch import Tensor

from verl.batch import Batch
from verl.method import Method


class Exploring(Method):
    """Method that adds the exploration reward, which reaches 1/2 at ``half_share`` times the maximum length."""

    def __init__(self, alpha: float, half_share: float) -> None:
        self.alpha, self.half_share = alpha, half_share

    def shape_rewards(self, batch: Batch, rewards: Tensor) -> Tensor:
        """Return the weighted sum of the outcome and exploration rewards, [B]."""
        effort = 1 - 0.5 ** (batch.response_lengths.double() / (self.half_share * self.max_response_length))
        effort = torch.where(batch.truncated, 0.0, effort)
        return self.alpha * batch.correct.double() + (1 - self.alpha) * effort
