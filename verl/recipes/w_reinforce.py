"""PSR, NSR and W-REINFORCE (arXiv 2506.01347): weight positive and negative samples separately.

With rewards of +1 for correct and -1 for wrong responses, the policy gradient is the sum of a part that reinforces
correct responses (PSR) and a part that suppresses wrong responses (NSR). W-REINFORCE reweights the first part:

    A = lambda if the response is correct, else -1        (lambda = 0.1 in the paper; lambda = 0 is NSR)

There is no baseline. Responses with an advantage of 0 are still included in the loss's mean over tokens.
"""

import torch
from torch import Tensor

from verl.batch import Batch


def weighted(batch: Batch, positive: float, negative: float) -> Tensor:
    """Return the advantages, [B]: ``positive`` for correct responses and -``negative`` for wrong responses."""
    weights = torch.tensor([-negative, positive], dtype=torch.float64)
    return weights[batch.correct.long()]
