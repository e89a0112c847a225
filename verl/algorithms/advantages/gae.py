"""Generalized advantage estimation, for PPO with a critic (Schulman et al. 2015, arXiv 1506.02438)."""

import torch
from torch import Tensor

from verl.algorithms.advantages.groups import check_shapes


def gae_advantages(
    token_rewards: Tensor, values: Tensor, response_mask: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Advantage of each response token over the critic's value, and the critic's regression target.

    Eq. 16 of the paper: A_t = sum over l >= 0 of (gamma lam)^l delta_{t+l}, where the temporal difference is
    delta_t = r_t + gamma V_{t+1} - V_t. V is 0 after the last response token: a response that was cut off at the
    maximum length counts as finished. ``lam=0`` gives delta_t (eq. 17), ``lam=1`` the discounted return minus V_t
    (eq. 18). The advantages are not whitened. Positions outside the mask are skipped: the token after a gap follows
    the one before it.

    Args:
        values: the critic's V_t in units of reward, ``[B, R]``; anything outside the mask.
        gamma: discount per token, in [0, 1].
        lam: weight of later temporal differences, in [0, 1]; small values trust the critic, large ones the rewards.

    Returns:
        Advantages and returns (advantages + values), both ``[B, R]`` in the dtype of ``token_rewards`` and 0
        outside the mask.
    """
    check_shapes({"token_rewards": token_rewards, "values": values, "response_mask": response_mask})
    # Tokens first, [R, B]: the recursion runs over contiguous rows.
    mask = response_mask.bool().T.contiguous()
    rewards, baseline = token_rewards.double().T.contiguous(), values.double().T.contiguous()
    advantages = torch.zeros_like(rewards)
    next_advantage = next_value = rewards.new_zeros(rewards.shape[1])
    # A_t = delta_t + gamma lam A_{t+1} (eq. 16 as a recursion), from the last token to the first.
    for t in reversed(range(len(rewards))):
        delta = rewards[t] + gamma * next_value - baseline[t]
        next_advantage = torch.where(mask[t], delta + gamma * lam * next_advantage, next_advantage)
        next_value = torch.where(mask[t], baseline[t], next_value)
        advantages[t] = next_advantage
    # The critic regresses to A_t + V_t.
    per_token = (advantages, advantages + baseline)
    masked = [torch.where(mask, t, 0.0).T.contiguous().to(token_rewards.dtype) for t in per_token]
    return masked[0], masked[1]
