"""ReMax: the greedy response's score as baseline (Li et al. 2023, arXiv 2310.10505)."""

import torch
from torch import Tensor

from verl.algorithms.advantages.groups import check_shapes


def remax_advantages(token_rewards: Tensor, response_mask: Tensor, baseline_scores: Tensor) -> Tensor:
    """Undiscounted sum of the rewards from each token on, minus the score of the greedy response to the same prompt.

    The paper's estimator weights every token of a response by r(x, a) - r(x, greedy a). With the whole score on the
    last token that is A_t = (sum over t' >= t of r_t') - b; earlier rewards, which a token cannot change, drop out.

    Args:
        token_rewards: ``[B, R]`` floating point; anything outside the mask.
        response_mask: ``[B, R]``, true or 1 on response tokens.
        baseline_scores: b in units of reward, ``[B]``: the score of the greedy response, without rewards that are given
            per token, such as a KL penalty.

    Returns:
        Advantages in units of reward, ``[B, R]`` in the dtype of ``token_rewards``, 0 outside the mask.

    Raises:
        ValueError: the shapes do not match.
    """
    check_shapes({"token_rewards": token_rewards, "response_mask": response_mask}, {"baseline_scores": baseline_scores})
    mask = response_mask.bool()
    rewards = torch.where(mask, token_rewards.double(), 0.0)
    rewards_to_go = rewards.flip(1).cumsum(1).flip(1)
    return torch.where(mask, rewards_to_go - baseline_scores.double()[:, None], 0.0).to(token_rewards.dtype)
