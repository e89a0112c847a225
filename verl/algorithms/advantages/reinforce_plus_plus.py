"""REINFORCE++: whitened over the whole batch, without a critic (Hu et al. 2025, arXiv 2501.03262)."""

import torch
from torch import Tensor

from verl.algorithms.advantages.gae import gae_advantages
from verl.algorithms.advantages.groups import check_shapes, on_response_tokens, scored_groups
from verl.algorithms.advantages.whiten import whitened


def reinforce_plus_plus_advantages(token_rewards: Tensor, response_mask: Tensor, gamma: float) -> Tensor:
    """Discounted return from each token to the end of its response, whitened over the batch's response tokens.

    The paper's global advantage normalization: A_t = (G_t - mean) / (std + 1e-8), where the return
    G_t = r_t + gamma G_{t+1} is 0 after the last response token; the paper has gamma = 1. A KL penalty, if wanted, is
    part of the token rewards. Positions outside the mask are skipped: the token after a gap follows the one before it.
    """
    check_shapes({"token_rewards": token_rewards, "response_mask": response_mask})
    # The return is GAE's advantage with lam = 1 over a critic whose values are 0 (eq. 18 of GAE's paper).
    rewards = token_rewards.double()
    returns, _ = gae_advantages(rewards, torch.zeros_like(rewards), response_mask, gamma, lam=1.0)
    return whitened(returns, response_mask).to(token_rewards.dtype)


def reinforce_plus_plus_baseline_advantages(
    token_rewards: Tensor, response_mask: Tensor, group_ids: Tensor, learned_mask: Tensor
) -> Tensor:
    """Score minus the group's mean score, on every response token, whitened over the tokens to learn from.

    The paper's REINFORCE++ w/ baseline: A = s - mean of the group, then (A - mean) / (std + 1e-8) over the batch.
    Unlike GRPO's, the divisor is common to all prompts, so a group of nearly equal scores is not blown up. A group of
    one has a baseline of 0. The result is 0 outside ``learned_mask``; other tokens count in the mean of their group.
    """
    check_shapes({"token_rewards": token_rewards, "learned_mask": learned_mask})
    groups, scores = scored_groups(token_rewards, response_mask, group_ids)
    centred = on_response_tokens(groups.centred(scores), response_mask)
    return whitened(centred, learned_mask).to(token_rewards.dtype)
