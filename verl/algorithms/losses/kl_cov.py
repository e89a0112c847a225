"""KL-Cov: a KL penalty on the tokens whose probability and advantage vary together most (arXiv 2505.22617)."""

import torch
from torch import Tensor

from verl.algorithms.losses.clip_cov import covariances
from verl.algorithms.losses.tokens import masked_tokens, probability_ratio, token_sums


def kl_cov_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    kl_cov_ratio: float,
    ppo_kl_coef: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Per-token loss -r A, plus ppo_kl_coef |log r| on the tokens of largest covariance, r = exp(logprobs - old).

    Nothing is clipped. ``kl_cov_ratio`` times the number of tokens are penalised, at least one; they are those of the
    micro-batch, as in veRL, with :func:`verl.algorithms.losses.clip_cov.covariances`.

    Args:
        logprobs: ``[B, R]`` log-probabilities (nats) of the response tokens under the policy being trained.
        old_logprobs: ``[B, R]`` the same under the policy at the start of the step.
        advantages: ``[B, R]``.
        response_mask: ``[B, R]``, true or 1 on response tokens; padding may hold anything.
        kl_cov_ratio: share of tokens that are penalised, in (0, 1]; 2e-4 in the paper for 32B, 2e-3 for 7B.
        ppo_kl_coef: weight of the penalty; 1 in the paper.

    Returns:
        Losses ``[B, R]``, 0 outside the mask, and detached metrics as sums over tokens: ``ppo_kl`` (k1 estimate
        old - new, Schulman 2020) and ``num_tokens``.
    """
    mask, log_ratio, advantages = masked_tokens(logprobs, old_logprobs, advantages, response_mask)
    losses = -probability_ratio(log_ratio) * advantages
    num_tokens = int(mask.sum())
    if num_tokens:
        together = torch.where(mask, covariances(logprobs, advantages, mask), -torch.inf)
        largest = together.flatten().topk(max(1, int(num_tokens * kl_cov_ratio))).indices
        chosen = torch.zeros_like(mask).flatten().index_fill(0, largest, True).view_as(mask)
        losses = losses + torch.where(chosen, ppo_kl_coef * log_ratio.abs(), 0.0)
    return losses, token_sums(log_ratio, mask)
