"""Positive and negative samples apart: PSR, NSR and W-REINFORCE (arXiv 2506.01347).

The gradient of the expected reward of +1 for a right response and -1 for a wrong one is the sum of a positive part,
which raises right responses (PSR), and a negative one, which lowers wrong ones (NSR). W-REINFORCE weights the first:

    A = lambda if the response is correct, else -1        (lambda = 0.1 in the paper; 0 is NSR)

There is no baseline. Responses with advantage 0 still count in the mean over tokens that the loss is.
"""

import torch
from torch import Tensor

from verl.batch import Batch


def weighted(batch: Batch, positive: float, negative: float) -> Tensor:
    """``positive`` for a correct response, -``negative`` for a wrong one: [B]."""
    weights = torch.tensor([-negative, positive], dtype=torch.float64)
    return weights[batch.correct.long()]
