"""On-policy RL with the optimal reward baseline: OPO (arXiv 2505.23585)."""

from torch import Tensor

from verl.algorithms.advantages.groups import on_response_tokens, scored_groups


def opo_advantages(token_rewards: Tensor, response_mask: Tensor, group_ids: Tensor) -> Tensor:
    """Score of each response minus the group's mean score weighted by length, on every response token.

    A_i = s_i - (sum over j of l_j s_j) / (sum over j of l_j), l_j the number of tokens of response j: the baseline of
    least variance if a response's squared gradient norm grows with its length. A group of one has a baseline of 0.
    """
    groups, scores = scored_groups(token_rewards, response_mask, group_ids)
    lengths = response_mask.bool().sum(1)
    baselines = groups.sums(lengths * scores) / groups.sums(lengths).clamp(min=1)
    relative = scores - (baselines * (groups.counts > 1))[groups.index]
    return on_response_tokens(relative, response_mask).to(token_rewards.dtype)
