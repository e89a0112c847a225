"""Geometric-mean policy optimisation: GMPO (arXiv 2507.20673)."""

import math

import torch
from torch import Tensor

from verl.algorithms.losses.tokens import check_clip_ranges, masked_tokens, probability_ratio, token_sums


def gmpo_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, response_mask: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Per-token loss -A s on every token of a response, with s the geometric mean of its clipped ratios.

    log s = mean over tokens of sign(A) min(sign(A) d, sign(A) clip(d, -clip_low, clip_high)), d = logprobs -
    old_logprobs: each token's log-ratio is clipped by itself, on the side where the objective would gain from more.
    A is the mean of the response's advantages. ``sequence_mean`` of these losses is the paper's objective.

    ``clip_low`` and ``clip_high`` bound log-ratios and are at least 0; 0.4 in the paper.
    """
    check_clip_ranges(clip_low, clip_high, largest=math.inf)
    mask, log_ratio, advantages = masked_tokens(logprobs, old_logprobs, advantages, response_mask)
    length = mask.sum(-1, keepdim=True).clamp(min=1)
    advantage = advantages.sum(-1, keepdim=True) / length
    # log s.
    clamped = log_ratio.clamp(-clip_low, clip_high)
    clipped = torch.where(advantage > 0, log_ratio > clamped, log_ratio < clamped) & (advantage != 0)
    log_s = torch.where(clipped, clamped, log_ratio).sum(-1, keepdim=True) / length
    losses = torch.where(mask, -advantage * probability_ratio(log_s), 0.0)
    return losses, token_sums(log_ratio, mask, pg_clipfrac=clipped)
