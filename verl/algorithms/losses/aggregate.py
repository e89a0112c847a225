"""Aggregation of per-token losses to the scalar that is differentiated.

Every count is passed in and is that of the whole optimiser step, over all micro-batches and ranks. If each micro-batch
were divided by its own count, the weight of a response would depend on its neighbours, and the gradient on the split
into micro-batches and ranks. The results of the micro-batches add up to the loss of the step.

Each function raises ``ValueError`` if a count is not positive.
"""

import torch
from torch import Tensor


def token_mean(per_token: Tensor, mask: Tensor, num_tokens: Tensor | float) -> Tensor:
    """Sum of ``per_token [B, R]`` over the mask, divided by ``num_tokens``; a scalar. All tokens weigh the same."""
    return _divided(_masked(per_token, mask), num_tokens=num_tokens)


def sequence_mean(per_token: Tensor, mask: Tensor, num_sequences: Tensor | float) -> Tensor:
    """Mean of ``per_token [B, R]`` over each response's tokens, summed, divided by ``num_sequences``; a scalar.

    Every response has the same weight, whatever its length, as in GRPO (arXiv 2402.03300) and GSPO (arXiv 2507.18071).
    A response without tokens contributes 0.
    """
    lengths = mask.bool().sum(-1).clamp(min=1)
    return _divided(_masked(per_token, mask).sum(-1) / lengths, num_sequences=num_sequences)


def sequence_sum(per_token: Tensor, mask: Tensor, num_sequences: Tensor | float, length: float = 1) -> Tensor:
    """Sum of ``per_token [B, R]`` over the mask, divided by ``num_sequences * length``; a scalar.

    With a length of 1 the weight of a response is its number of tokens. Dr.GRPO (arXiv 2503.20783): a constant replaces
    the response's own length, which would make a wrong response cheaper per token the longer it is. It is in tokens,
    such as the maximum response length, and never the padded width R, which changes with the batch.
    """
    return _divided(_masked(per_token, mask), num_sequences=num_sequences, length=length)


def response_mean(per_response: Tensor, mask: Tensor, num_sequences: Tensor | float) -> Tensor:
    """Return the mean of ``per_response [B]`` over responses with tokens in ``mask [B, R]``; a scalar.

    It is the sum divided by ``num_sequences``, the number of such responses.
    """
    return _divided(_masked(per_response, mask.bool().any(dim=-1)), num_sequences=num_sequences)


def _masked(values: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask.bool(), values, 0.0)


def _divided(values: Tensor, **counts: Tensor | float) -> Tensor:
    """Return the sum of ``values``, divided by the product of ``counts``."""
    divisor: Tensor | float = 1
    for name, count in counts.items():
        if not count > 0:
            raise ValueError(f"{name}={float(count)}: must be the positive count of the whole optimiser step")
        divisor = divisor * count
    return values.sum() / divisor
