"""The plain policy gradient: GPG (arXiv 2504.02546), and REINFORCE."""

import torch
from torch import Tensor

from verl.algorithms.losses.tokens import token_sums


def gpg_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, response_mask: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Per-token loss -A logprobs: no probability ratio, so nothing is clipped and later mini-batches are off policy.

    Only the gradient of the loss is meaningful, not its value.

    Args:
        logprobs: ``[B, R]`` log-probabilities (nats) of the response tokens under the policy being trained.
        old_logprobs: ``[B, R]`` the same under the policy at the start of the step, for the metrics alone.
        advantages: ``[B, R]``.
        response_mask: ``[B, R]``, true or 1 on response tokens; padding may hold anything.

    Returns:
        Losses ``[B, R]``, 0 outside the mask, and detached metrics as sums over tokens: ``ppo_kl`` (k1 estimate
        old - new, Schulman 2020) and ``num_tokens``.
    """
    mask = response_mask.bool()
    # Masked before the product: an infinite or NaN padding value would reach the gradient as 0 * inf.
    logprobs = torch.where(mask, logprobs, 0.0)
    log_ratio = logprobs - torch.where(mask, old_logprobs, 0.0)
    advantages = torch.where(mask, advantages, 0.0)
    return -advantages * logprobs, token_sums(log_ratio, mask)
