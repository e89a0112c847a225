"""Group-relative advantages: GRPO (arXiv 2402.03300) and Dr.GRPO (arXiv 2503.20783)."""

from torch import Tensor

from verl.algorithms.advantages.groups import on_response_tokens, scored_groups

STD_EPS = 1e-6


def grpo_advantages(token_rewards: Tensor, response_mask: Tensor, group_ids: Tensor, norm_by_std: bool) -> Tensor:
    """Score of each response relative to the other responses to the same prompt, on every response token.

    GRPO (``norm_by_std``): A = (s - mean) / (std + 1e-6) with the mean and the unbiased standard deviation of the
    group. Dr.GRPO: A = s - mean. In a group of one the mean is 0 and the standard deviation 1, as in veRL.
    """
    groups, scores = scored_groups(token_rewards, response_mask, group_ids)
    relative = groups.centred(scores)
    if norm_by_std:
        relative = relative / (groups.deviations(scores) + STD_EPS)[groups.index]
    return on_response_tokens(relative, response_mask).to(token_rewards.dtype)
