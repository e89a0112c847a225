"""Clip-Cov: tokens whose probability and advantage vary together learn nothing now and then (arXiv 2505.22617)."""

from zlib import crc32

import torch
from torch import Tensor

from verl.algorithms.losses.ppo_clip import clipped_surrogate
from verl.algorithms.losses.tokens import masked_tokens, token_sums


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

    Raising the probability of tokens that are likely and good already is what lowers the entropy. Candidates are the
    tokens that the clip leaves alone and whose :func:`covariances` are between the two bounds; ``clip_cov_ratio`` times
    the number of tokens of them are drawn, at least one. Means and the draw are those of the micro-batch, as in veRL.
    The draw depends on its old log-probabilities and advantages alone: padding, rows of which nothing is learned and
    the rounding of a kernel leave it as it is.

    Args:
        logprobs: ``[B, R]`` log-probabilities (nats) of the response tokens under the policy being trained.
        old_logprobs: ``[B, R]`` the same under the policy at the start of the step.
        advantages: ``[B, R]``.
        response_mask: ``[B, R]``, true or 1 on response tokens; padding may hold anything.
        clip_low: the ratio is clipped below at 1 - clip_low, in [0, 1].
        clip_high: the ratio is clipped above at 1 + clip_high, at least 0.
        clip_cov_ratio: share of tokens that are drawn, above 0; 2e-4 in the paper.
        clip_cov_lb: covariances of candidates are above this; 1 in the paper.
        clip_cov_ub: and below this; 5 in the paper.

    Returns:
        Losses ``[B, R]``, 0 outside the mask, and detached metrics as sums over tokens: ``pg_clipfrac`` (tokens that
        were drawn), ``ppo_kl`` (k1 estimate old - new, Schulman 2020), ``num_tokens``.

    Raises:
        ValueError: ``clip_low`` or ``clip_high`` is out of range.
    """
    mask, log_ratio, advantages = masked_tokens(logprobs, old_logprobs, advantages, response_mask)
    losses, clipped = clipped_surrogate(log_ratio, advantages, clip_low, clip_high)
    together = covariances(logprobs, advantages, mask)
    candidates = mask & ~clipped & (together > clip_cov_lb) & (together < clip_cov_ub)
    rows = candidates.flatten().nonzero().flatten()
    wanted = max(int(clip_cov_ratio * int(mask.sum())), 1)
    given = torch.stack([t[mask].detach().float().cpu() for t in (old_logprobs, advantages)])
    generator = torch.Generator().manual_seed(crc32(given.numpy().tobytes()))
    order = torch.randperm(len(rows), generator=generator).to(rows.device)
    drawn = torch.zeros_like(mask).flatten().index_fill(0, rows[order[:wanted]], True).view_as(mask)
    metrics = {"pg_clipfrac": drawn.sum().to(losses.dtype)} | token_sums(log_ratio, mask)
    return torch.where(drawn, 0.0, losses), metrics


def covariances(logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """(A - mean of A) (logprobs - mean of logprobs) of each token, ``[B, R]``, means over the mask; 0 outside."""
    count = mask.sum().clamp(min=1)
    values = [torch.where(mask, t.detach(), 0.0) for t in (advantages, logprobs)]
    first, second = (t - t.sum() / count for t in values)
    return torch.where(mask, first * second, 0.0)
