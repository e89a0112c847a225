"""The clipped surrogate of PPO (arXiv 1707.06347), with separate lower and upper clip ranges and dual clip."""

import math

import torch
from torch import Tensor

from verl.algorithms.losses.tokens import masked_tokens, probability_ratio, token_sums


def ppo_clip_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    clip_low: float,
    clip_high: float,
    clip_ratio_c: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Per-token loss -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) with r = exp(logprobs - old_logprobs).

    Dual clip (arXiv 1912.09729) bounds the loss where A < 0, which plain clipping does not bound at large ratios: there
    it is min(that loss, -clip_ratio_c A), with no gradient at the bound.

    Args:
        logprobs: ``[B, R]`` log-probabilities (nats) of the response tokens under the policy being trained.
        old_logprobs: ``[B, R]`` the same under the policy at the start of the step.
        advantages: ``[B, R]``.
        response_mask: ``[B, R]``, true or 1 on response tokens; padding may hold anything.
        clip_low: the ratio is clipped below at 1 - clip_low, in [0, 1].
        clip_high: the ratio is clipped above at 1 + clip_high, at least 0.
        clip_ratio_c: the ratio that bounds the loss where A < 0, finite and above 1; ``None`` for no dual clip.

    Returns:
        Losses ``[B, R]``, 0 outside the mask, and detached metrics as sums over tokens, so that they can be added
        over micro-batches and ranks and divided by the sum of ``num_tokens`` once: ``pg_clipfrac`` (tokens on
        which clipping is active), ``ppo_kl`` (k1 estimate old - new, Schulman 2020), ``num_tokens``, and with dual
        clip ``pg_clipfrac_lower`` (tokens on which its bound is active).

    Raises:
        ValueError: ``clip_low``, ``clip_high`` or ``clip_ratio_c`` is out of range.
    """
    if clip_ratio_c is not None and not 1 < clip_ratio_c < math.inf:
        raise ValueError(f"clip_ratio_c={clip_ratio_c}: must be finite and above 1, or None for no dual clip")
    mask, log_ratio, advantages = masked_tokens(logprobs, old_logprobs, advantages, response_mask)
    losses, clipped = clipped_surrogate(log_ratio, advantages, clip_low, clip_high)
    metrics = {"pg_clipfrac": clipped.sum().to(losses.dtype)} | token_sums(log_ratio, mask)
    if clip_ratio_c is not None:
        bound = -clip_ratio_c * advantages
        bounded = (advantages < 0) & (losses > bound)
        losses = torch.where(bounded, bound, losses)
        metrics["pg_clipfrac_lower"] = bounded.sum().to(losses.dtype)
    return losses, metrics


def clipped_surrogate(
    log_ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) with r = exp(log_ratio), and where clipping is active.

    ``log_ratio`` and ``advantages`` are ``[B, R]``, 0 on padding. Raises ``ValueError`` as :func:`check_clip_ranges`.
    """
    check_clip_ranges(clip_low, clip_high)
    ratio = probability_ratio(log_ratio)
    plain = -ratio * advantages
    clipped = -ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    return torch.maximum(plain, clipped), clipped > plain


def check_clip_ranges(clip_low: float, clip_high: float) -> None:
    """Raise ``ValueError`` unless ``clip_low`` is in [0, 1] and ``clip_high`` at least 0."""
    if not 0 <= clip_low <= 1:
        raise ValueError(f"clip_low={clip_low}: must be in [0, 1]")
    if not clip_high >= 0:
        raise ValueError(f"clip_high={clip_high}: must be at least 0")
