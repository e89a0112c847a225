"""Aggregation of per-token losses to the scalar that is differentiated.

Every count is passed in and is that of the whole optimiser step, over all micro-batches and ranks. If each micro-batch
were divided by its own count, the weight of a response would depend on its neighbours, and the gradient on the split
into micro-batches and ranks. The results of the micro-batches add up to the loss of the step.
"""

import torch
from torch import Tensor


def token_mean(per_token: Tensor, mask: Tensor, num_tokens: Tensor | float) -> Tensor:
    """Sum of ``per_token [B, R]`` over the mask, divided by ``num_tokens``; a scalar. Every token has the same weight.

    ``num_tokens`` is the number of response tokens of the whole optimiser step.

    Raises:
        ValueError: ``num_tokens`` is not positive.
    """
    _check_positive("num_tokens", num_tokens, "token count of the optimiser step")
    return _masked(per_token, mask).sum() / num_tokens


def sequence_mean(per_token: Tensor, mask: Tensor, num_sequences: Tensor | float) -> Tensor:
    """Mean of ``per_token [B, R]`` over each response's tokens, summed, divided by ``num_sequences``; a scalar.

    Every response has the same weight, whatever its length, as in GRPO (arXiv 2402.03300) and GSPO (arXiv 2507.18071).
    A response without tokens contributes 0. ``num_sequences`` is the number of responses of the whole optimiser step.

    Raises:
        ValueError: ``num_sequences`` is not positive.
    """
    _check_positive("num_sequences", num_sequences, "response count of the optimiser step")
    lengths = mask.bool().sum(-1).clamp(min=1)
    return (_masked(per_token, mask).sum(-1) / lengths).sum() / num_sequences


def sequence_sum(per_token: Tensor, mask: Tensor, num_sequences: Tensor | float) -> Tensor:
    """Sum of ``per_token [B, R]`` over the mask, divided by ``num_sequences``; a scalar.

    The weight of a response is its number of tokens. ``num_sequences`` is the number of responses of the whole
    optimiser step.

    Raises:
        ValueError: ``num_sequences`` is not positive.
    """
    _check_positive("num_sequences", num_sequences, "response count of the optimiser step")
    return _masked(per_token, mask).sum() / num_sequences


def response_mean(per_response: Tensor, mask: Tensor, num_sequences: Tensor | float) -> Tensor:
    """Sum of ``per_response [B]`` over the responses that have tokens in ``mask [B, R]``, divided by ``num_sequences``;
    a scalar. ``num_sequences`` is the number of such responses of the whole optimiser step.

    Raises:
        ValueError: ``num_sequences`` is not positive.
    """
    _check_positive("num_sequences", num_sequences, "response count of the optimiser step")
    return torch.where(mask.bool().any(dim=-1), per_response, 0.0).sum() / num_sequences


def constant_length(per_token: Tensor, mask: Tensor, num_sequences: Tensor | float, length: float) -> Tensor:
    """Sum of ``per_token [B, R]`` over the mask, divided by ``num_sequences * length``; a scalar.

    Dr.GRPO (arXiv 2503.20783): a constant replaces the response's own length, which would make a wrong response cheaper
    per token the longer it is. ``num_sequences`` is the number of responses of the whole optimiser step; ``length`` is
    in tokens, such as the maximum response length, and never the padded width R, which changes with the batch.

    Raises:
        ValueError: ``num_sequences`` or ``length`` is not positive.
    """
    _check_positive("num_sequences", num_sequences, "response count of the optimiser step")
    _check_positive("length", length, "number of tokens by which every response is divided")
    return _masked(per_token, mask).sum() / (num_sequences * length)


def _masked(per_token: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask.bool(), per_token, 0.0)


def _check_positive(name: str, value: Tensor | float, meaning: str) -> None:
    if not value > 0:
        raise ValueError(f"{name}={float(value)}: must be the positive {meaning}")
