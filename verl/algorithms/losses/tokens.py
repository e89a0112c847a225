"""What the policy losses share: ratios that stay finite, nothing from padding, clipping, and what all of them log."""

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log ratios are clamped to plus or minus this, so that exp stays finite; the gradient is 0 beyond it."""


def masked_tokens(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, response_mask: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The mask as booleans, and log ratios ``logprobs - old_logprobs`` and advantages, 0 outside it; all ``[B, R]``."""
    mask = response_mask.bool()
    # Masked before exp: an infinite or NaN padding value would reach the gradient as 0 * inf.
    return mask, torch.where(mask, logprobs - old_logprobs, 0.0), torch.where(mask, advantages, 0.0)


def probability_ratio(log_ratio: Tensor) -> Tensor:
    """exp of log ratios (nats) that are clamped to plus or minus ``MAX_LOG_RATIO``."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def check_clip_ranges(clip_low: float, clip_high: float, largest: float = 1.0) -> None:
    """Raise ``ValueError`` unless ``clip_low`` is in [0, ``largest``] and ``clip_high`` at least 0."""
    if not 0 <= clip_low <= largest:
        raise ValueError(f"clip_low={clip_low}: must be at least 0 and at most {largest}")
    if not clip_high >= 0:
        raise ValueError(f"clip_high={clip_high}: must be at least 0")


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


def token_sums(log_ratio: Tensor, mask: Tensor, **chosen: Tensor) -> dict[str, Tensor]:
    """What a loss logs, as detached sums over tokens; ``log_ratio`` is ``[B, R]``, 0 outside the mask.

    How many tokens are true in each of ``chosen``, ``ppo_kl`` (k1 estimate old - new, Schulman 2020) and
    ``num_tokens``. Sums of micro-batches and ranks can be added, and divided by the sum of ``num_tokens`` once.
    """
    counts = {name: tokens.sum().to(log_ratio.dtype) for name, tokens in chosen.items()}
    return counts | {"ppo_kl": -log_ratio.detach().sum(), "num_tokens": mask.sum().to(log_ratio.dtype)}
