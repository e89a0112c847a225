"""A reward for exploring, apart from that for being right: RLSP (arXiv 2502.06773).

    reward = alpha * (1 if correct else 0) + (1 - alpha) * (1 - gamma^length)

The paper rewards exploration whether the response is right or wrong; the simplest such reward, which it says suffices,
makes the model take more steps before its answer. Assumed, as its exact form could not be read: it grows with the
number of tokens and saturates, alpha is 0.8, and a response that was cut off has none, or the best policy would never
end.
"""

import torch
from torch import Tensor

from verl.batch import Batch
from verl.method import Method


class Exploring(Method):
    """The rewards above; the exploration reward is 1/2 at ``half_share`` of the maximal length."""

    def __init__(self, alpha: float, half_share: float) -> None:
        self.alpha, self.half_share = alpha, half_share

    def shape_rewards(self, batch: Batch, rewards: Tensor) -> Tensor:
        """[B]."""
        effort = 1 - 0.5 ** (batch.response_lengths.double() / (self.half_share * self.max_response_length))
        effort = torch.where(batch.truncated, 0.0, effort)
        return self.alpha * batch.correct.double() + (1 - self.alpha) * effort
