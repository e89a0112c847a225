"""Geometric-mean policy optimisation: GMPO (arXiv 2507.20673)."""

import torch
from torch import Tensor

from verl.algorithms.losses.tokens import masked_tokens, probability_ratio, token_sums


def gmpo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    clip_low: float,
    clip_high: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Per-token loss -A s on every token of a response, with s the geometric mean of its clipped ratios.

    log s = mean over tokens of sign(A) min(sign(A) d, sign(A) clip(d, -clip_low, clip_high)), d = logprobs -
    old_logprobs: each token's log-ratio is clipped by itself, on the side where the objective would gain from more.
    A is the mean of the response's advantages. ``sequence_mean`` of these losses is the paper's objective.

    Args:
        logprobs: ``[B, R]`` log-probabilities (nats) of the response tokens under the policy being trained.
        old_logprobs: ``[B, R]`` the same under the policy at the start of the step.
        advantages: ``[B, R]``.
        response_mask: ``[B, R]``, true or 1 on response tokens; padding may hold anything.
        clip_low: log-ratios are clipped below at -clip_low, at least 0; 0.4 in the paper.
        clip_high: log-ratios are clipped above at clip_high, at least 0; 0.4 in the paper.

    Returns:
        Losses ``[B, R]``, 0 outside the mask, and detached metrics as sums over tokens: ``pg_clipfrac`` (tokens on
        which clipping is active), ``ppo_kl`` (k1 estimate old - new, Schulman 2020), ``num_tokens``.

    Raises:
        ValueError: ``clip_low`` or ``clip_high`` is below 0.
    """
    for name, clip in (("clip_low", clip_low), ("clip_high", clip_high)):
        if not clip >= 0:
            raise ValueError(f"{name}={clip}: must be at least 0")
    mask, log_ratio, advantages = masked_tokens(logprobs, old_logprobs, advantages, response_mask)
    length = mask.sum(-1, keepdim=True).clamp(min=1)
    advantage = advantages.sum(-1, keepdim=True) / length
    clamped = log_ratio.clamp(-clip_low, clip_high)
    clipped = torch.where(advantage > 0, log_ratio > clamped, log_ratio < clamped) & (advantage != 0)
    mean = torch.where(clipped, clamped, log_ratio).sum(-1, keepdim=True) / length
    losses = torch.where(mask, -advantage * probability_ratio(mean), 0.0)
    metrics = {"pg_clipfrac": clipped.sum().to(losses.dtype)} | token_sums(log_ratio, mask)
    return losses, metrics
