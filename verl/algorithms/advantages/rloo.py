"""REINFORCE leave-one-out advantages: RLOO (Ahmadian et al. 2024, arXiv 2402.14740)."""

from torch import Tensor

from verl.algorithms.advantages.groups import on_response_tokens, scored_groups


def rloo_advantages(token_rewards: Tensor, response_mask: Tensor, group_ids: Tensor) -> Tensor:
    """Score of each response minus the mean score of the other responses to the same prompt, on every response token.

    The paper's RLOO estimator: A_i = s_i - 1/(n-1) * (sum over j != i of s_j) in a group of n. A response is not part
    of its own baseline, so the policy gradient is unbiased; in a group of one the baseline is 0.
    """
    groups, scores = scored_groups(token_rewards, response_mask, group_ids)
    mean_of_others = (groups.sums(scores)[groups.index] - scores) / (groups.counts - 1).clamp(min=1)[groups.index]
    return on_response_tokens(scores - mean_of_others, response_mask).to(token_rewards.dtype)
