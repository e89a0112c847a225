"""REINFORCE++: returns whitened over the whole batch, without critic or groups (Hu et al. 2025, arXiv 2501.03262)."""

import torch
from torch import Tensor

from verl.algorithms.advantages.gae import gae_advantages
from verl.algorithms.advantages.groups import check_shapes
from verl.algorithms.advantages.whiten import whitened


def reinforce_plus_plus_advantages(token_rewards: Tensor, response_mask: Tensor, gamma: float) -> Tensor:
    """Discounted return from each token to the end of its response, whitened over the batch's response tokens.

    The paper's global advantage normalization: A_t = (G_t - mean) / (std + 1e-8), where the return
    G_t = r_t + gamma G_{t+1} is 0 after the last response token; the paper has gamma = 1. A KL penalty, if wanted, is
    part of the token rewards.

    Positions outside the mask are skipped: the token after a gap follows the one before it.

    Args:
        token_rewards: ``[B, R]`` floating point; anything outside the mask.
        response_mask: ``[B, R]``, true or 1 on response tokens.
        gamma: discount per token, in [0, 1].

    Returns:
        Advantages in units of the batch's standard deviation, ``[B, R]`` in the dtype of ``token_rewards``, 0
        outside the mask.

    Raises:
        ValueError: the shapes do not match.
    """
    check_shapes({"token_rewards": token_rewards, "response_mask": response_mask}, {})
    # The return is GAE's advantage with lam = 1 over a critic whose values are 0 (eq. 18 of GAE's paper).
    rewards = token_rewards.double()
    returns, _ = gae_advantages(rewards, torch.zeros_like(rewards), response_mask, gamma, lam=1.0)
    return whitened(returns, response_mask).to(token_rewards.dtype)
