"""Losses against the collapse of entropy, by the covariance of probability and advantage (arXiv 2505.22617).

Raising the probability of tokens that are likely and good already is what lowers the entropy. Clip-Cov takes a few of
them out of the loss, KL-Cov holds them back. Both compare the tokens of a micro-batch with each other, as in veRL.
"""

from zlib import crc32

import torch
from torch import Tensor

from verl.algorithms.losses.tokens import clipped_surrogate, masked_tokens, probability_ratio, token_sums


def covariances(logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """(A - mean of A) (logprobs - mean of logprobs) of each token, ``[B, R]``, means over the mask; 0 outside."""
    count = mask.sum().clamp(min=1)
    values = [torch.where(mask, t.detach(), 0.0) for t in (advantages, logprobs)]
    first, second = (t - t.sum() / count for t in values)
    return torch.where(mask, first * second, 0.0)


def clip_cov_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    clip_low: float,
    clip_high: float,
    clip_cov_ratio: float,
    clip_cov_lb: float,
    clip_cov_ub: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Per-token clipped surrogate of PPO, with loss 0 on a few random tokens of large covariance.

    Candidates are the tokens that the clip leaves alone and whose :func:`covariances` are between the two bounds;
    ``clip_cov_ratio`` times the number of tokens of them are drawn, at least one. The draw depends on the old
    log-probabilities and advantages of the micro-batch alone: padding, rows of which nothing is learned and the
    rounding of a kernel leave it as it is. ``pg_clipfrac`` counts the tokens that were drawn.

    Args:
        clip_low: the ratio is clipped below at 1 - clip_low, in [0, 1].
        clip_high: the ratio is clipped above at 1 + clip_high, at least 0.
        clip_cov_ratio: share of tokens that are drawn, above 0; 2e-4 in the paper.
        clip_cov_lb: covariances of candidates are above this; 1 in the paper.
        clip_cov_ub: and below this; 5 in the paper.
    """
    mask, log_ratio, advantages = masked_tokens(logprobs, old_logprobs, advantages, response_mask)
    losses, clipped = clipped_surrogate(log_ratio, advantages, clip_low, clip_high)
    # 1. The candidates.
    covariance = covariances(logprobs, advantages, mask)
    candidates = mask & ~clipped & (covariance > clip_cov_lb) & (covariance < clip_cov_ub)
    positions = candidates.flatten().nonzero().flatten()
    num_drawn = max(int(clip_cov_ratio * int(mask.sum())), 1)
    # 2. A draw among them, seeded by what the micro-batch holds.
    contents = torch.stack([t[mask].detach().float().cpu() for t in (old_logprobs, advantages)])
    generator = torch.Generator().manual_seed(crc32(contents.numpy().tobytes()))
    order = torch.randperm(len(positions), generator=generator).to(positions.device)
    drawn = _at(positions[order[:num_drawn]], mask)
    return torch.where(drawn, 0.0, losses), token_sums(log_ratio, mask, pg_clipfrac=drawn)


def kl_cov_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    kl_cov_ratio: float,
    ppo_kl_coef: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Per-token loss -r A, plus ppo_kl_coef |log r| on the tokens of largest covariance; nothing is clipped.

    Args:
        kl_cov_ratio: share of tokens that are penalised, at least one, in (0, 1]; 2e-4 in the paper for 32B, 2e-3
            for 7B.
        ppo_kl_coef: weight of the penalty; 1 in the paper.
    """
    mask, log_ratio, advantages = masked_tokens(logprobs, old_logprobs, advantages, response_mask)
    losses = -probability_ratio(log_ratio) * advantages
    num_tokens = int(mask.sum())
    if num_tokens:
        covariance = torch.where(mask, covariances(logprobs, advantages, mask), -torch.inf)
        largest = covariance.flatten().topk(max(1, int(num_tokens * kl_cov_ratio))).indices
        losses = losses + torch.where(_at(largest, mask), ppo_kl_coef * log_ratio.abs(), 0.0)
    return losses, token_sums(log_ratio, mask)


def _at(positions: Tensor, mask: Tensor) -> Tensor:
    """Bool in the shape of ``mask [B, R]``, true at ``positions`` in the flattened tokens."""
    return torch.zeros_like(mask).flatten().index_fill(0, positions, True).view_as(mask)
