"""Group-relative advantages: GRPO (arXiv 2402.03300) and Dr.GRPO (arXiv 2503.20783)."""

import torch
from torch import Tensor

STD_EPS = 1e-6


def grpo_advantages(token_rewards: Tensor, response_mask: Tensor, group_ids: Tensor, norm_by_std: bool) -> Tensor:
    """Score of each response relative to the other responses to the same prompt, on every response token.

    The score is the sum of the response's token rewards. GRPO (``norm_by_std``): (score - mean) / (std + 1e-6)
    with the unbiased standard deviation of the group; Dr.GRPO: score - mean.

    Args:
        token_rewards: ``[B, R]`` floating point, 0 on padding.
        response_mask: ``[B, R]``, true or 1 on response tokens.
        group_ids: ``[B]`` int64, equal for responses to the same prompt; in any order.
        norm_by_std: divide by the group's standard deviation.

    Returns:
        Advantages ``[B, R]`` in the dtype of ``token_rewards``, 0 outside the mask.

    Raises:
        ValueError: shapes do not fit, or a group has a single response.
    """
    if (
        token_rewards.dim() != 2
        or response_mask.shape != token_rewards.shape
        or group_ids.shape != token_rewards.shape[:1]
    ):
        raise ValueError(
            f"token_rewards {tuple(token_rewards.shape)}, response_mask {tuple(response_mask.shape)}, "
            f"group_ids {tuple(group_ids.shape)}: expected [B, R], [B, R] and [B]"
        )
    # float64 makes the group sums independent of the responses' order to well below float32's resolution.
    scores = token_rewards.double().sum(1)
    ids, group, counts = group_ids.unique(return_inverse=True, return_counts=True)
    if bool((counts < 2).any()):
        lonely = int(ids[counts < 2][0])
        raise ValueError(
            f"group_ids: group {lonely} has 1 response: GRPO needs at least 2 responses per prompt; set rollout.n>=2"
        )
    sums = torch.zeros(len(ids), dtype=torch.float64, device=scores.device)
    centred = scores - (sums.index_add(0, group, scores) / counts)[group]
    if norm_by_std:
        variance = sums.index_add(0, group, centred.square()) / (counts - 1)
        centred = centred / (variance.sqrt() + STD_EPS)[group]
    return torch.where(response_mask.bool(), centred[:, None], 0.0).to(token_rewards.dtype)
