"""Pass@k advantages: only the best response to a prompt learns (Tang et al. 2025, arXiv 2503.19595)."""

import torch
from torch import Tensor

from verl.algorithms.advantages.groups import check_shapes, group_responses, on_response_tokens, response_scores
from verl.algorithms.advantages.grpo import STD_EPS


def grpo_passk_advantages(token_rewards: Tensor, response_mask: Tensor, group_ids: Tensor, norm_by_std: bool) -> Tensor:
    """The lead of the group's best response over its second best, on the tokens of the best; 0 on all others.

    An estimate of the gradient of the largest score among the responses to a prompt: what the batch would lose without
    its best response. Of several best responses the first has the lead, 0. The score is the sum of the token rewards.

    Args:
        token_rewards: ``[B, R]`` floating point; anything outside the mask.
        response_mask: ``[B, R]``, true or 1 on response tokens.
        group_ids: ``[B]`` int64, equal for responses to the same prompt; in any order; at least 2 of each.
        norm_by_std: divide by the group's unbiased standard deviation, plus 1e-6.

    Returns:
        Advantages ``[B, R]`` in the dtype of ``token_rewards``, 0 outside the mask.

    Raises:
        ValueError: the shapes do not match.
    """
    check_shapes({"token_rewards": token_rewards, "response_mask": response_mask}, {"group_ids": group_ids})
    groups = group_responses(group_ids)
    scores = response_scores(token_rewards, response_mask)
    deviations = groups.deviations(scores) + STD_EPS
    advantages = torch.zeros_like(scores)
    for group in range(len(groups.counts)):
        rows = (groups.index == group).nonzero().flatten()
        best, second = scores[rows].topk(2).values
        lead = best - second
        advantages[rows[scores[rows].argmax()]] = lead / deviations[group] if norm_by_std else lead
    return on_response_tokens(advantages, response_mask).to(token_rewards.dtype)
