"""The baseline of least variance for each token of the responses to a prompt: veRL's ``optimal_token_baseline``."""

import torch
from torch import Tensor

from verl.algorithms.advantages.groups import check_shapes, group_responses, rewards_to_go

EPS = 1e-8


def optimal_token_baseline_advantages(
    token_rewards: Tensor, response_mask: Tensor, group_ids: Tensor, variances: Tensor, zero_tail: bool
) -> Tensor:
    """Sum of the rewards from each token on, minus a baseline of the same column in the other responses.

    A_it = G_it - b_t, G_it the undiscounted return from token t on, and b_t = (sum over i of W_it G_it) /
    (sum over i of W_it + 1e-8) over the responses of the group that have a token t. W_it is the sum of ``variances`` up
    to token t, a proxy of the squared norm of the gradient of the response's log-probability so far. In a group of one
    the baseline is 0. The mask has no gaps.

    Args:
        variances: ``[B, R]``, at least 0, of each token; see :func:`token_variances`; anything outside the mask.
        zero_tail: where only one response of the group still has a token, its baseline is 0 and not its own return
            (veRL's ``tir_optimal_token_baseline``).
    """
    per_token = {"token_rewards": token_rewards, "response_mask": response_mask, "variances": variances}
    check_shapes(per_token, {"group_ids": group_ids})
    mask, groups = response_mask.bool(), group_responses(group_ids)
    # G_it and W_it.
    returns = rewards_to_go(token_rewards, mask)
    weights = torch.where(mask, torch.where(mask, variances.double(), 0.0).cumsum(1), 0.0)
    # b_t of each group, [G, R].
    baselines = groups.sums(weights * returns) / (groups.sums(weights) + EPS)
    compared = groups.sums(mask) > 1 if zero_tail else (groups.counts > 1)[:, None]
    relative = returns - torch.where(compared, baselines, 0.0)[groups.index]
    return torch.where(mask, relative, 0.0).to(token_rewards.dtype)


def token_variances(logprobs: Tensor, sum_pi_squared: Tensor) -> Tensor:
    """1 - 2 p + (sum of the squares of all probabilities), ``[B, R]``: the squared norm of d log p / d logits.

    Args:
        logprobs: ``[B, R]`` log p of each response token, in nats.
        sum_pi_squared: ``[B, R]`` that sum, of the distribution that the token was drawn from.
    """
    return 1 - 2 * logprobs.exp() + sum_pi_squared
