"""Pass@k advantages: only the best response to a prompt learns (Tang et al. 2025, arXiv 2503.19595)."""

import torch
from torch import Tensor

from verl.algorithms.advantages.groups import on_response_tokens, scored_groups
from verl.algorithms.advantages.grpo import STD_EPS


def grpo_passk_advantages(token_rewards: Tensor, response_mask: Tensor, group_ids: Tensor, norm_by_std: bool) -> Tensor:
    """The lead of the group's best response over its second best, on the tokens of the best; 0 on all others.

    An estimate of the gradient of the largest score among the responses to a prompt: what the batch would lose without
    its best response. Of several best responses the first has the lead, 0. Groups have at least 2 responses.
    ``norm_by_std`` divides by the group's unbiased standard deviation, plus 1e-6.
    """
    groups, scores = scored_groups(token_rewards, response_mask, group_ids)
    deviations = groups.deviations(scores) + STD_EPS
    advantages = torch.zeros_like(scores)
    for group in range(len(groups.counts)):
        rows = (groups.index == group).nonzero().flatten()
        best, second = scores[rows].topk(2).values
        lead = best - second
        advantages[rows[scores[rows].argmax()]] = lead / deviations[group] if norm_by_std else lead
    return on_response_tokens(advantages, response_mask).to(token_rewards.dtype)
