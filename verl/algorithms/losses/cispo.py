"""Clipped importance-sampling weights: CISPO (MiniMax-M1, arXiv 2506.13585)."""

import torch
from torch import Tensor

from verl.algorithms.losses.ppo_clip import check_clip_ranges
from verl.algorithms.losses.tokens import probability_ratio, token_sums


def cispo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    clip_low: float,
    clip_high: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Per-token loss -sg[clip(r, 1 - clip_low, 1 + clip_high)] A logprobs with r = exp(logprobs - old_logprobs).

    sg stops the gradient: clipping bounds the weight of a token's gradient but never removes it, whatever the sign of
    A. Only the gradient of the loss is meaningful, not its value; it is that of -r A wherever the weight is not
    clipped.

    Args:
        logprobs: ``[B, R]`` log-probabilities (nats) of the response tokens under the policy being trained.
        old_logprobs: ``[B, R]`` the same under the policy at the start of the step.
        advantages: ``[B, R]``.
        response_mask: ``[B, R]``, true or 1 on response tokens; padding may hold anything.
        clip_low: the weight is clipped below at 1 - clip_low, in [0, 1]; 1 means no lower bound, as in the paper.
        clip_high: the weight is clipped above at 1 + clip_high, at least 0.

    Returns:
        Losses ``[B, R]``, 0 outside the mask, and detached metrics as sums over tokens: ``pg_clipfrac`` (tokens
        whose weight is clipped), ``ppo_kl`` (k1 estimate old - new, Schulman 2020), ``num_tokens``.

    Raises:
        ValueError: ``clip_low`` or ``clip_high`` is out of range.
    """
    check_clip_ranges(clip_low, clip_high)
    mask = response_mask.bool()
    logprobs = torch.where(mask, logprobs, 0.0)
    log_ratio = logprobs.detach() - torch.where(mask, old_logprobs, 0.0)
    advantages = torch.where(mask, advantages, 0.0)
    ratio = probability_ratio(log_ratio)
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    metrics = {"pg_clipfrac": (weight != ratio).sum().to(ratio.dtype)} | token_sums(log_ratio, mask)
    return -weight * advantages * logprobs, metrics
