"""Group policy gradient: GPG (arXiv 2504.02546)."""

from torch import Tensor

from verl.algorithms.advantages.groups import check_shapes, group_responses, on_response_tokens, response_scores


def gpg_advantages(token_rewards: Tensor, response_mask: Tensor, group_ids: Tensor, learned_mask: Tensor) -> Tensor:
    """Score of each response minus the group's mean score, scaled up over the batch, on every response token.

    A = alpha (s - mean of the group), where alpha = responses / (responses with a score other than 0), at least one of
    them, both of those that are learned from: filler must not change the gradient. The scale makes up for prompts
    without a correct response, which give no gradient. The count is veRL's; the paper's leaves out prompts whose
    responses are all correct as well. The score s is the sum of the token rewards. A group of one has a mean of 0.

    Args:
        token_rewards: ``[B, R]`` floating point; anything outside the mask.
        response_mask: ``[B, R]``, true or 1 on response tokens.
        group_ids: ``[B]`` int64, equal for responses to the same prompt; in any order.
        learned_mask: ``[B, R]``, the response tokens to learn from.

    Returns:
        Advantages in units of reward, ``[B, R]`` in the dtype of ``token_rewards``, 0 outside the mask.

    Raises:
        ValueError: the shapes do not match.
    """
    per_token = {"token_rewards": token_rewards, "response_mask": response_mask, "learned_mask": learned_mask}
    check_shapes(per_token, {"group_ids": group_ids})
    scores = response_scores(token_rewards, response_mask)
    learned = scores[learned_mask.bool().any(dim=1)]
    alpha = len(learned) / learned.count_nonzero().clamp(min=1)
    centred = group_responses(group_ids).centred(scores)
    return on_response_tokens(alpha * centred, response_mask).to(token_rewards.dtype)
