"""Implementations of the advantage estimators. See the package docstring for common arguments."""

import torch
from torch import Tensor

from verl.algorithms.advantages.groups import (
    GROUP_STD_EPS,
    check_shapes,
    group_responses,
    on_response_tokens,
    rewards_to_go,
    scored_groups,
)

BATCH_STD_EPS = 1e-8
WEIGHT_EPS = 1e-8


def grpo_advantages(token_rewards: Tensor, response_mask: Tensor, group_ids: Tensor, norm_by_std: bool) -> Tensor:
    """Compute GRPO advantages: each response's score relative to its group, assigned to all response tokens.

    With ``norm_by_std``, this is GRPO (arXiv 2402.03300): A = (s - mean) / (std + 1e-6), with the mean and the unbiased
    standard deviation of the group. Without ``norm_by_std``, this is Dr.GRPO (arXiv 2503.20783): A = s - mean. As in
    veRL, a group with a single response has mean 0 and standard deviation 1.
    """
    groups, scores = scored_groups(token_rewards, response_mask, group_ids)
    relative = groups.normalised(scores) if norm_by_std else groups.centred(scores)
    return on_response_tokens(relative, response_mask).to(token_rewards.dtype)


def grpo_passk_advantages(token_rewards: Tensor, response_mask: Tensor, group_ids: Tensor, norm_by_std: bool) -> Tensor:
    """Set the advantage of the best response in each group to its margin over the second best, and all others to 0.

    This estimates the gradient of the highest score among the responses to a prompt (Tang et al. 2025, arXiv
    2503.19595). If several responses tie for best, all advantages are 0. Groups must have at least 2 responses.
    ``norm_by_std`` divides by the group's unbiased standard deviation plus 1e-6.
    """
    groups, scores = scored_groups(token_rewards, response_mask, group_ids)
    deviations = groups.deviations(scores) + GROUP_STD_EPS
    advantages = torch.zeros_like(scores)
    for group in range(len(groups.counts)):
        rows = (groups.index == group).nonzero().flatten()
        best, second = scores[rows].topk(2).values
        lead = best - second
        advantages[rows[scores[rows].argmax()]] = lead / deviations[group] if norm_by_std else lead
    return on_response_tokens(advantages, response_mask).to(token_rewards.dtype)


def rloo_advantages(token_rewards: Tensor, response_mask: Tensor, group_ids: Tensor) -> Tensor:
    """Compute REINFORCE leave-one-out advantages (Ahmadian et al. 2024, arXiv 2402.14740) for all response tokens.

    A_i = s_i - 1/(n-1) * (sum over j != i of s_j) in a group of n. A response does not contribute to its own baseline,
    so the policy gradient is unbiased. For a single response, the baseline is 0.
    """
    groups, scores = scored_groups(token_rewards, response_mask, group_ids)
    mean_of_others = (groups.sums(scores)[groups.index] - scores) / (groups.counts - 1).clamp(min=1)[groups.index]
    return on_response_tokens(scores - mean_of_others, response_mask).to(token_rewards.dtype)


def opo_advantages(token_rewards: Tensor, response_mask: Tensor, group_ids: Tensor) -> Tensor:
    """Compute OPO advantages (arXiv 2505.23585): each response's score minus the group's length-weighted mean score.

    A_i = s_i - (sum over j of l_j s_j) / (sum over j of l_j), where l_j is the length of response j in tokens. This
    baseline minimizes the variance if the squared gradient norm of a response is proportional to its length. For a
    single response, the baseline is 0.
    """
    groups, scores = scored_groups(token_rewards, response_mask, group_ids)
    lengths = response_mask.bool().sum(1)
    baselines = groups.sums(lengths * scores) / groups.sums(lengths).clamp(min=1)
    relative = scores - (baselines * (groups.counts > 1))[groups.index]
    return on_response_tokens(relative, response_mask).to(token_rewards.dtype)


def gpg_advantages(token_rewards: Tensor, response_mask: Tensor, group_ids: Tensor, learned_mask: Tensor) -> Tensor:
    """Compute the advantages of group policy gradient (GPG, arXiv 2504.02546) for all response tokens.

    A = alpha (s - mean of the group) with alpha = responses / max(1, responses with a nonzero score). Both counts
    exclude responses without tokens in ``learned_mask``, so filler responses do not change the gradient. Alpha
    compensates for prompts without a correct response, which contribute no gradient. The counts follow veRL. The paper
    also excludes prompts whose responses are all correct. For a single response, the mean is 0.
    """
    check_shapes({"token_rewards": token_rewards, "learned_mask": learned_mask})
    groups, scores = scored_groups(token_rewards, response_mask, group_ids)
    learned = scores[learned_mask.bool().any(dim=1)]
    alpha = len(learned) / learned.count_nonzero().clamp(min=1)
    return on_response_tokens(alpha * groups.centred(scores), response_mask).to(token_rewards.dtype)


def optimal_token_baseline_advantages(
    token_rewards: Tensor, response_mask: Tensor, group_ids: Tensor, variances: Tensor
) -> Tensor:
    """Subtract the group's minimum-variance baseline at each token position from the return at that position.

    This is veRL's ``tir_optimal_token_baseline``: A_it = G_it - b_t, where G_it is the undiscounted return from the
    t-th token in the mask onwards, and b_t = (sum over i of W_it G_it) / (sum over i of W_it + 1e-8) over the group's
    responses that have a t-th token. W_it is the sum of ``variances`` up to the t-th token. This sum approximates the
    squared gradient norm of the log-probability of the first t tokens. If only one response has a t-th token, b_t is 0.
    Tokens outside the mask, such as those written by an environment, are skipped. If the mask has no gaps, the result
    also equals that of veRL's ``optimal_token_baseline``, which compares tokens in the same column.

    ``variances [B, R]`` are the nonnegative variances of the tokens; see :func:`token_variances`.
    """
    per_token = {"token_rewards": token_rewards, "response_mask": response_mask, "variances": variances}
    check_shapes(per_token, {"group_ids": group_ids})
    mask, groups = response_mask.bool(), group_responses(group_ids)
    # Compute G_it and W_it, with the t-th token of the mask in column t.
    order = (~mask).byte().argsort(dim=1, stable=True)
    returns = rewards_to_go(token_rewards, mask).gather(1, order)
    present = mask.gather(1, order)
    weights = torch.where(present, torch.where(mask, variances.double(), 0.0).gather(1, order).cumsum(1), 0.0)
    # Compute b_t for each group, [G, R].
    baselines = groups.sums(weights * returns) / (groups.sums(weights) + WEIGHT_EPS)
    relative = returns - torch.where(groups.sums(present) > 1, baselines, 0.0)[groups.index]
    return torch.where(mask, torch.zeros_like(relative).scatter(1, order, relative), 0.0).to(token_rewards.dtype)


def token_variances(logprobs: Tensor, sum_pi_squared: Tensor) -> Tensor:
    """Return the squared norm of d log p / d logits at each token, 1 - 2 p + sum of pi^2, ``[B, R]``.

    ``logprobs [B, R]`` contains log p of the response tokens in nats. ``sum_pi_squared [B, R]`` is the sum of squared
    probabilities over the whole vocabulary at each token.
    """
    return 1 - 2 * logprobs.exp() + sum_pi_squared


def remax_advantages(token_rewards: Tensor, response_mask: Tensor, baseline_scores: Tensor) -> Tensor:
    """Subtract the score of the greedy response to the same prompt from the undiscounted return of each token.

    ReMax (Li et al. 2023, arXiv 2310.10505) weights every token of a response by r(x, a) - r(x, greedy a). If the whole
    score is assigned to the last token, this is A_t = (sum over t' >= t of r_t') - b.

    ``baseline_scores [B]`` are the scores b of the greedy responses in units of reward, excluding per-token rewards
    such as a KL penalty.
    """
    check_shapes({"token_rewards": token_rewards, "response_mask": response_mask}, {"baseline_scores": baseline_scores})
    relative = rewards_to_go(token_rewards, response_mask) - baseline_scores.double()[:, None]
    return torch.where(response_mask.bool(), relative, 0.0).to(token_rewards.dtype)


def gae_advantages(
    token_rewards: Tensor, values: Tensor, response_mask: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Compute generalized advantage estimates (arXiv 1506.02438).

    Eq. 16 of the paper: A_t = sum over l >= 0 of (gamma lam)^l delta_{t+l}, with the temporal difference delta_t = r_t
    + gamma V_{t+1} - V_t. V is 0 after the last response token, so a truncated response is treated as finished.
    ``lam=0`` gives delta_t (eq. 17), and ``lam=1`` gives the discounted return minus V_t (eq. 18). The advantages are
    not whitened. The recursion skips positions outside the mask.

    Args:
        values: the critic's V_t in units of reward, ``[B, R]``.
        gamma: discount per token, in [0, 1].
        lam: weight of later temporal differences, in [0, 1]; 0 relies only on the critic, 1 only on the rewards.

    Returns:
        Advantages and returns (advantages + values, the critic's targets), both ``[B, R]``.
    """
    check_shapes({"token_rewards": token_rewards, "values": values, "response_mask": response_mask})
    # Put tokens first, [R, B], so that the recursion runs over contiguous rows.
    mask = response_mask.bool().T.contiguous()
    rewards, baseline = token_rewards.double().T.contiguous(), values.double().T.contiguous()
    advantages = torch.zeros_like(rewards)
    next_advantage = next_value = rewards.new_zeros(rewards.shape[1])
    # A_t = delta_t + gamma lam A_{t+1} (eq. 16 as a recursion), from the last token to the first.
    for t in reversed(range(len(rewards))):
        delta = rewards[t] + gamma * next_value - baseline[t]
        next_advantage = torch.where(mask[t], delta + gamma * lam * next_advantage, next_advantage)
        next_value = torch.where(mask[t], baseline[t], next_value)
        advantages[t] = next_advantage
    # The critic's targets are A_t + V_t.
    per_token = (advantages, advantages + baseline)
    masked = [torch.where(mask, t, 0.0).T.contiguous().to(token_rewards.dtype) for t in per_token]
    return masked[0], masked[1]


def whitened(advantages: Tensor, response_mask: Tensor) -> Tensor:
    """Return (A - mean) / (std + 1e-8), with the mean and unbiased std over all response tokens of the batch.

    Every token has equal weight, so longer responses have more influence. The result ``[B, R]`` has the dtype of
    ``advantages`` and is 0 outside the mask. With fewer than two tokens in the mask, it is 0 everywhere.
    """
    check_shapes({"advantages": advantages, "response_mask": response_mask})
    mask = response_mask.bool()
    num_tokens = mask.sum()
    mean = torch.where(mask, advantages.double(), 0.0).sum() / num_tokens
    centred = torch.where(mask, advantages.double() - mean, 0.0)
    # For a single token, the unbiased variance would be 0 / 0; the clamp makes it 0.
    variance = centred.square().sum() / (num_tokens - 1).clamp(min=1)
    return (centred / (variance.sqrt() + BATCH_STD_EPS)).to(advantages.dtype)


def reinforce_plus_plus_advantages(token_rewards: Tensor, response_mask: Tensor, gamma: float) -> Tensor:
    """Compute the discounted return of each token, whitened over all response tokens of the batch.

    REINFORCE++ (Hu et al. 2025, arXiv 2501.03262): A_t = (G_t - mean) / (std + 1e-8) with G_t = r_t + gamma G_{t+1},
    where G is 0 after the last response token. The paper uses gamma = 1. Any KL penalty is already included in the
    token rewards. Positions outside the mask are skipped, as in GAE.
    """
    check_shapes({"token_rewards": token_rewards, "response_mask": response_mask})
    # The return is GAE's advantage with lam = 1 and values of 0 (eq. 18 of the GAE paper).
    rewards = token_rewards.double()
    returns, _ = gae_advantages(rewards, torch.zeros_like(rewards), response_mask, gamma, lam=1.0)
    return whitened(returns, response_mask).to(token_rewards.dtype)


def reinforce_plus_plus_baseline_advantages(
    token_rewards: Tensor, response_mask: Tensor, group_ids: Tensor, learned_mask: Tensor
) -> Tensor:
    """Subtract the group's mean score from each score, then whiten the result over all tokens in ``learned_mask``.

    REINFORCE++ with baseline (arXiv 2501.03262): A = s - mean of the group, then (A - mean) / (std + 1e-8) over the
    batch. Unlike in GRPO, all prompts share one divisor, so small differences within a group are not amplified. For a
    single response, the baseline is 0. The result is 0 outside ``learned_mask``.
    """
    check_shapes({"token_rewards": token_rewards, "learned_mask": learned_mask})
    groups, scores = scored_groups(token_rewards, response_mask, group_ids)
    centred = on_response_tokens(groups.centred(scores), response_mask)
    return whitened(centred, learned_mask).to(token_rewards.dtype)
