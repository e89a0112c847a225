"""Clipped importance-sampling weights: CISPO (MiniMax-M1, arXiv 2506.13585)."""

import torch
from torch import Tensor

from verl.algorithms.losses.tokens import check_clip_ranges, masked_tokens, probability_ratio, token_sums


def cispo_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, response_mask: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Per-token loss -sg[clip(r, 1 - clip_low, 1 + clip_high)] A logprobs.

    sg stops the gradient: clipping bounds the weight of a token's gradient but never removes it, whatever the sign of
    A. Only the gradient of the loss is meaningful, not its value; it is that of -r A wherever the weight is not
    clipped. ``clip_low`` is in [0, 1], and 1 means no lower bound, as in the paper; ``clip_high`` is at least 0.
    """
    check_clip_ranges(clip_low, clip_high)
    mask, log_ratio, advantages = masked_tokens(logprobs.detach(), old_logprobs, advantages, response_mask)
    ratio = probability_ratio(log_ratio)
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    losses = -weight * advantages * torch.where(mask, logprobs, 0.0)
    return losses, token_sums(log_ratio, mask, pg_clipfrac=weight != ratio)
