"""How per-token losses become the number that is differentiated."""

import torch
from torch import Tensor


def token_mean(per_token: Tensor, mask: Tensor, num_tokens: Tensor | float) -> Tensor:
    """Sum of ``per_token [B, R]`` over the mask, divided by ``num_tokens``; a scalar.

    ``num_tokens`` is the number of response tokens of the whole optimiser step, over all micro-batches and ranks.

    Raises:
        ValueError: ``num_tokens`` is not positive.
    """
    # One global count, passed in: dividing each micro-batch by its own count would weigh a token by how short its
    # neighbours are, and the gradient would change with the split into micro-batches and ranks.
    if not num_tokens > 0:
        raise ValueError(f"num_tokens={float(num_tokens)}: must be the positive token count of the optimiser step")
    return torch.where(mask.bool(), per_token, 0.0).sum() / num_tokens
