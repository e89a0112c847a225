"""ReMax: the greedy response's score as baseline (Li et al. 2023, arXiv 2310.10505)."""

import torch
from torch import Tensor

from verl.algorithms.advantages.groups import check_shapes, rewards_to_go


def remax_advantages(token_rewards: Tensor, response_mask: Tensor, baseline_scores: Tensor) -> Tensor:
    """Undiscounted sum of the rewards from each token on, minus the score of the greedy response to the same prompt.

    The paper's estimator weights every token of a response by r(x, a) - r(x, greedy a). With the whole score on the
    last token that is A_t = (sum over t' >= t of r_t') - b; earlier rewards, which a token cannot change, drop out.

    ``baseline_scores [B]``, b in units of reward, are the scores of the greedy responses, without rewards that are
    given per token, such as a KL penalty.
    """
    check_shapes({"token_rewards": token_rewards, "response_mask": response_mask}, {"baseline_scores": baseline_scores})
    relative = rewards_to_go(token_rewards, response_mask) - baseline_scores.double()[:, None]
    return torch.where(response_mask.bool(), relative, 0.0).to(token_rewards.dtype)
