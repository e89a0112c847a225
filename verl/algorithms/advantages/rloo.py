"""REINFORCE leave-one-out advantages: RLOO (Ahmadian et al. 2024, arXiv 2402.14740)."""

from torch import Tensor

from verl.algorithms.advantages.groups import check_shapes, group_responses, on_response_tokens, response_scores


def rloo_advantages(token_rewards: Tensor, response_mask: Tensor, group_ids: Tensor) -> Tensor:
    """Score of each response minus the mean score of the other responses to the same prompt, on every response token.

    The paper's RLOO estimator: A_i = s_i - 1/(n-1) * (sum over j != i of s_j) in a group of n. A response is not part
    of its own baseline, so the policy gradient is unbiased; in a group of one the baseline is 0. The score s is the sum
    of the token rewards.

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
    scores = response_scores(token_rewards, response_mask)
    mean_of_others = (groups.sums(scores)[groups.index] - scores) / (groups.counts - 1).clamp(min=1)[groups.index]
    return on_response_tokens(scores - mean_of_others, response_mask).to(token_rewards.dtype)
