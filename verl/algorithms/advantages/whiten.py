"""Whitening: advantages of a whole batch on one scale."""

import torch
from torch import Tensor

from verl.algorithms.advantages.groups import check_shapes

STD_EPS = 1e-8


def whitened(advantages: Tensor, response_mask: Tensor) -> Tensor:
    """(A - mean) / (std + 1e-8), with the mean and unbiased std over the response tokens of the whole batch.

    Every token counts once, so long responses weigh more than short ones. With fewer than two response tokens there is
    nothing to compare, and the result is 0. ``[B, R]`` in the dtype of ``advantages``, 0 outside the mask.
    """
    check_shapes({"advantages": advantages, "response_mask": response_mask})
    mask = response_mask.bool()
    num_tokens = mask.sum()
    mean = torch.where(mask, advantages.double(), 0.0).sum() / num_tokens
    centred = torch.where(mask, advantages.double() - mean, 0.0)
    # For a single token the unbiased variance would be 0 / 0; the clamp makes it 0.
    variance = centred.square().sum() / (num_tokens - 1).clamp(min=1)
    return (centred / (variance.sqrt() + STD_EPS)).to(advantages.dtype)
