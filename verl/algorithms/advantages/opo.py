"""On-policy RL with the optimal reward baseline: OPO (arXiv 2505.23585)."""

from torch import Tensor

from verl.algorithms.advantages.groups import check_shapes, group_responses, on_response_tokens, response_scores


def opo_advantages(token_rewards: Tensor, response_mask: Tensor, group_ids: Tensor) -> Tensor:
    """Score of each response minus the group's mean score weighted by length, on every response token.

    A_i = s_i - (sum over j of l_j s_j) / (sum over j of l_j), l_j the number of tokens of response j: the baseline of
    least variance if a response's squared gradient norm grows with its length. The score s is the sum of the token
    rewards. A group of one has a baseline of 0.

    Args:
        token_rewards: ``[B, R]`` floating point; anything outside the mask.
        response_mask: ``[B, R]``, true or 1 on response tokens.
        group_ids: ``[B]`` int64, equal for responses to the same prompt; in any order.

    Returns:
        Advantages in units of reward, ``[B, R]`` in the dtype of ``token_rewards``, 0 outside the mask.

    Raises:
        ValueError: the shapes do not match.
    """
    check_shapes({"token_rewards": token_rewards, "response_mask": response_mask}, {"group_ids": group_ids})
    groups = group_responses(group_ids)
    scores, lengths = response_scores(token_rewards, response_mask), response_mask.bool().sum(1)
    baselines = groups.sums(lengths * scores) / groups.sums(lengths).clamp(min=1)
    others = groups.counts > 1
    relative = scores - (baselines * others)[groups.index]
    return on_response_tokens(relative, response_mask).to(token_rewards.dtype)
