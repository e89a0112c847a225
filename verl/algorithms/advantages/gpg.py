"""Group policy gradient: GPG (arXiv 2504.02546)."""

from torch import Tensor

from verl.algorithms.advantages.groups import check_shapes, on_response_tokens, scored_groups


def gpg_advantages(token_rewards: Tensor, response_mask: Tensor, group_ids: Tensor, learned_mask: Tensor) -> Tensor:
    """Score of each response minus the group's mean score, scaled up over the batch, on every response token.

    A = alpha (s - mean of the group), where alpha = responses / (responses with a score other than 0), at least one of
    them, both of those that are learned from: filler must not change the gradient. The scale makes up for prompts
    without a correct response, which give no gradient. The count is veRL's; the paper's leaves out prompts whose
    responses are all correct as well. A group of one has a mean of 0.
    """
    check_shapes({"token_rewards": token_rewards, "learned_mask": learned_mask})
    groups, scores = scored_groups(token_rewards, response_mask, group_ids)
    learned = scores[learned_mask.bool().any(dim=1)]
    alpha = len(learned) / learned.count_nonzero().clamp(min=1)
    return on_response_tokens(alpha * groups.centred(scores), response_mask).to(token_rewards.dtype)
