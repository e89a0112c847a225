"""Group-relative advantages: GRPO (arXiv 2402.03300) and Dr.GRPO (arXiv 2503.20783)."""

from torch import Tensor

from verl.algorithms.advantages.groups import check_shapes, group_responses, on_response_tokens

STD_EPS = 1e-6


def grpo_advantages(token_rewards: Tensor, response_mask: Tensor, group_ids: Tensor, norm_by_std: bool) -> Tensor:
    """Score of each response relative to the other responses to the same prompt, on every response token.

    The score s is the sum of the response's token rewards. GRPO (``norm_by_std``): A = (s - mean) / (std + 1e-6) with
    the mean and the unbiased standard deviation of the group. Dr.GRPO: A = s - mean. In a group of one the mean is 0
    and the standard deviation 1, as in veRL.

    Args:
        token_rewards: ``[B, R]`` floating point, 0 on padding.
        response_mask: ``[B, R]``, true or 1 on response tokens.
        group_ids: ``[B]`` int64, equal for responses to the same prompt; in any order.
        norm_by_std: divide by the group's standard deviation.

    Returns:
        Advantages ``[B, R]`` in the dtype of ``token_rewards``, 0 outside the mask.

    Raises:
        ValueError: the shapes do not match.
    """
    check_shapes({"token_rewards": token_rewards, "response_mask": response_mask}, {"group_ids": group_ids})
    groups = group_responses(group_ids)
    scores = token_rewards.double().sum(1)
    relative = groups.centred(scores)
    if norm_by_std:
        relative = relative / (groups.deviations(scores) + STD_EPS)[groups.index]
    return on_response_tokens(relative, response_mask).to(token_rewards.dtype)
