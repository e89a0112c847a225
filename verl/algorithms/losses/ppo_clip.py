"""The clipped surrogate of PPO (arXiv 1707.06347), with separate lower and upper clip ranges and dual clip."""

import math

import torch
from torch import Tensor

from verl.algorithms.losses.tokens import clipped_surrogate, masked_tokens, token_sums


def ppo_clip_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    clip_low: float,
    clip_high: float,
    clip_ratio_c: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Per-token loss -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A).

    Dual clip (arXiv 1912.09729) bounds the loss where A < 0, which plain clipping does not bound at large ratios: there
    it is min(that loss, -clip_ratio_c A), with no gradient at the bound.

    Args:
        clip_low: the ratio is clipped below at 1 - clip_low, in [0, 1].
        clip_high: the ratio is clipped above at 1 + clip_high, at least 0.
        clip_ratio_c: the ratio that bounds the loss where A < 0, finite and above 1; ``None`` for no dual clip, which
            logs ``pg_clipfrac_lower`` (tokens on which its bound is active).
    """
    if clip_ratio_c is not None and not 1 < clip_ratio_c < math.inf:
        raise ValueError(f"clip_ratio_c={clip_ratio_c}: must be finite and above 1, or None for no dual clip")
    mask, log_ratio, advantages = masked_tokens(logprobs, old_logprobs, advantages, response_mask)
    losses, clipped = clipped_surrogate(log_ratio, advantages, clip_low, clip_high)
    if clip_ratio_c is None:
        return losses, token_sums(log_ratio, mask, pg_clipfrac=clipped)
    bound = -clip_ratio_c * advantages
    bounded = (advantages < 0) & (losses > bound)
    metrics = token_sums(log_ratio, mask, pg_clipfrac=clipped, pg_clipfrac_lower=bounded)
    return torch.where(bounded, bound, losses), metrics
