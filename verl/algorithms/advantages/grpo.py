"""Group-relative advantages: GRPO (arXiv 2402.03300) and Dr.GRPO (arXiv 2503.20783)."""

from torch import Tensor

from verl.algorithms.advantages.groups import check_shapes, group_responses, on_response_tokens

STD_EPS = 1e-6


def grpo_advantages(token_rewards: Tensor, response_mask: Tensor, group_ids: Tensor, norm_by_std: bool) -> Tensor:
    """Score of each response relative to the other responses to the same prompt, on every response token.

    The score s is the sum of the response's token rewards. GRPO (``norm_by_std``): A = (s - mean) / (std + 1e-6) with
    the mean and the unbiased standard deviation of the group. Dr.GRPO: A = s - mean.

    Args:
        token_rewards: ``[B, R]`` floating point, 0 on padding.
        response_mask: ``[B, R]``, true or 1 on response tokens.
        group_ids: ``[B]`` int64, equal for responses to the same prompt; in any order.
        norm_by_std: divide by the group's standard deviation.

    Returns:
        Advantages ``[B, R]`` in the dtype of ``token_rewards``, 0 outside the mask.

    Raises:
        ValueError: the shapes do not match, or a group has only one response.
    """
    check_shapes({"token_rewards": token_rewards, "response_mask": response_mask}, {"group_ids": group_ids})
    groups = group_responses(group_ids, "GRPO")
    centred = groups.centred(token_rewards.double().sum(1))
    if norm_by_std:
        variance = groups.sums(centred.square()) / (groups.counts - 1)
        centred = centred / (variance.sqrt() + STD_EPS)[groups.index]
    return on_response_tokens(centred, response_mask).to(token_rewards.dtype)
