"""Truncated importance sampling between the rollout engine's policy and the trainer's.

Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training".
"""

import torch
from torch import Tensor

from verl.algorithms.losses.tokens import MAX_LOG_RATIO


def rollout_weights(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    response_mask: Tensor,
    level: str,
    cap: float,
    sampled_mask: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Weights min(exp(old - rollout), cap) by which the per-token policy losses are multiplied.

    ``token``: each token's own ratio. ``sequence``: the ratio of the whole response, exp(sum over its tokens of
    (old - rollout)), on all of its tokens. Before the cap, a ratio is clamped to exp(``MAX_LOG_RATIO``).

    Args:
        old_logprobs: ``[B, R]`` log-probabilities (nats) that the trainer computed before the update.
        rollout_logprobs: ``[B, R]`` those that the rollout engine sampled with.
        response_mask: ``[B, R]``, true or 1 on response tokens; padding may hold anything.
        level: ``token`` or ``sequence``.
        cap: largest weight, finite and above 0; the paper's C.
        sampled_mask: ``[B, R]``, all tokens of the responses, if ``response_mask`` leaves some out; the ratio of a
            whole response is over these.

    Returns:
        Weights ``[B, R]``, detached, 0 outside the mask, and metrics as sums over tokens: ``tis_weight``,
        ``tis_capped`` (tokens whose ratio is above the cap), ``num_tokens``.
    """
    mask = response_mask.bool()
    sampled = mask if sampled_mask is None else sampled_mask.bool()
    log_ratio = torch.where(sampled, (old_logprobs - rollout_logprobs).detach(), 0.0)
    if level == "sequence":
        log_ratio = log_ratio.sum(-1, keepdim=True).expand_as(log_ratio)
    # Clamped from above only: a vanishing weight is correct, and no gradient passes here.
    ratio = log_ratio.clamp(max=MAX_LOG_RATIO).exp()
    weights = torch.where(mask, ratio.clamp(max=cap), 0.0)
    metrics = {
        "tis_weight": weights.sum(),
        "tis_capped": (mask & (ratio > cap)).sum().to(weights.dtype),
        "num_tokens": mask.sum().to(weights.dtype),
    }
    return weights, metrics


def loss_weights(policy_loss: str, weights: Tensor, response_mask: Tensor) -> Tensor:
    """What the per-token losses of ``policy_loss`` are multiplied by, ``[B, R]``.

    :func:`rollout_weights` themselves; with ``gmpo``, whose ratio is one of responses, their geometric mean over the
    tokens of the response, as in veRL.
    """
    if policy_loss != "gmpo":
        return weights
    mask = response_mask.bool()
    # A weight may have vanished; 1e-10 as in veRL.
    logs = torch.where(mask, (weights + 1e-10).log(), 0.0)
    mean = logs.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
    return torch.where(mask, mean.exp(), 0.0)


def mean_rollout_weight(
    old_logprobs: Tensor, rollout_logprobs: Tensor, response_mask: Tensor, level: str, cap: float
) -> float:
    """Mean of :func:`rollout_weights` over the batch, of tokens or of responses by ``level``; 1 if it vanishes.

    Weights divided by it have a mean of 1. Policy losses are proportional to advantages, so advantages divided by it
    give the same losses.
    """
    weights, _ = rollout_weights(old_logprobs, rollout_logprobs, response_mask, level, cap)
    mask = response_mask.bool()
    if level == "sequence":
        weights, mask = weights.max(-1).values, mask.any(-1)
    mean = (weights.sum() / mask.sum().clamp(min=1)).item()
    return mean if mean > 1e-8 else 1.0
