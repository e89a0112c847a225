"""REINFORCE++ with a group baseline: centred per prompt, scaled per batch (Hu et al. 2025, arXiv 2501.03262)."""

from torch import Tensor

from verl.algorithms.advantages.groups import check_shapes, group_responses, on_response_tokens, response_scores
from verl.algorithms.advantages.whiten import whitened


def reinforce_plus_plus_baseline_advantages(
    token_rewards: Tensor, response_mask: Tensor, group_ids: Tensor, learned_mask: Tensor
) -> Tensor:
    """Score minus the group's mean score, on every response token, whitened over the batch's response tokens.

    The paper's REINFORCE++ w/ baseline: A = s - mean of the group, then (A - mean) / (std + 1e-8) over the batch.
    Unlike GRPO's, the divisor is common to all prompts, so a group of nearly equal scores is not blown up. The score s
    is the sum of the token rewards; a group of one has a baseline of 0.

    Args:
        token_rewards: ``[B, R]`` floating point; anything outside the mask.
        response_mask: ``[B, R]``, true or 1 on response tokens.
        group_ids: ``[B]`` int64, equal for responses to the same prompt; in any order.
        learned_mask: ``[B, R]``, the response tokens to learn from, over which the batch is whitened; the others count
            only in the mean of their group.

    Returns:
        Advantages in units of the batch's standard deviation, ``[B, R]`` in the dtype of ``token_rewards``, 0
        outside ``learned_mask``.

    Raises:
        ValueError: the shapes do not match.
    """
    per_token = {"token_rewards": token_rewards, "response_mask": response_mask, "learned_mask": learned_mask}
    check_shapes(per_token, {"group_ids": group_ids})
    groups = group_responses(group_ids)
    centred = groups.centred(response_scores(token_rewards, response_mask))
    return whitened(on_response_tokens(centred, response_mask), learned_mask).to(token_rewards.dtype)
