"""What the policy losses share: ratios that stay finite, nothing from padding, and the sums that all of them log."""

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


def token_sums(log_ratio: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Detached sums over tokens: ``ppo_kl`` (k1 estimate old - new, Schulman 2020) and ``num_tokens``.

    ``log_ratio`` is ``[B, R]``, 0 outside the mask. Sums of micro-batches and ranks can be added, and divided by the
    sum of ``num_tokens`` once.
    """
    return {"ppo_kl": -log_ratio.detach().sum(), "num_tokens": mask.sum().to(log_ratio.dtype)}
