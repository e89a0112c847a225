"""Aggregation of per-token losses into a scalar loss.

Counts must cover all micro-batches and ranks of the optimiser step, so that the losses of the micro-batches add up to
the loss of the step. Dividing by per-micro-batch counts would make the gradient depend on how the step is split into
micro-batches and ranks.

Every function raises ``ValueError`` if a count is not positive.
"""

import torch
from torch import Tensor


def token_mean(per_token: Tensor, mask: Tensor, num_tokens: Tensor | float) -> Tensor:
    """Sum ``per_token [B, R]`` over the mask and divide by ``num_tokens``, so that all tokens have equal weight."""
    return _divided(_masked(per_token, mask), num_tokens=num_tokens)


def sequence_mean(per_token: Tensor, mask: Tensor, num_sequences: Tensor | float) -> Tensor:
    """Average ``per_token [B, R]`` over each response's tokens, sum over responses, and divide by ``num_sequences``.

    All responses have equal weight, as in GRPO (arXiv 2402.03300) and GSPO (arXiv 2507.18071). A response without
    tokens contributes 0.
    """
    lengths = mask.bool().sum(-1).clamp(min=1)
    return _divided(_masked(per_token, mask).sum(-1) / lengths, num_sequences=num_sequences)


def sequence_sum(per_token: Tensor, mask: Tensor, num_sequences: Tensor | float, length: float = 1) -> Tensor:
    """Sum ``per_token [B, R]`` over the mask and divide by ``num_sequences * length``.

    Dr.GRPO (arXiv 2503.20783) divides by a constant ``length`` in tokens, because dividing by the length of the
    response would penalise long wrong responses less per token. Pass the maximum response length rather than the padded
    width R, which changes with the batch.
    """
    return _divided(_masked(per_token, mask), num_sequences=num_sequences, length=length)


def response_mean(per_response: Tensor, mask: Tensor, num_sequences: Tensor | float) -> Tensor:
    """Sum ``per_response [B]`` over the responses with tokens in ``mask [B, R]`` and divide by ``num_sequences``."""
    return _divided(_masked(per_response, mask.bool().any(dim=-1)), num_sequences=num_sequences)


def _masked(values: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask.bool(), values, 0.0)


def _divided(values: Tensor, **counts: Tensor | float) -> Tensor:
    """Divide the sum of ``values`` by the product of ``counts``."""
    divisor: Tensor | float = 1
    for name, count in counts.items():
        if not count > 0:
            raise ValueError(f"{name}={float(count)}: must be the positive count of the whole optimiser step")
        divisor = divisor * count
    return values.sum() / divisor
