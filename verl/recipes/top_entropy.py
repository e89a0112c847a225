"""The 80/20 rule: policy gradients of the tokens of highest entropy alone (arXiv 2506.01939)."""

import math

import torch
from torch import Tensor

from verl.algorithms.losses import LossInputs, policy_loss, ppo_clip_loss


def top_entropy_weights(mini_batch: LossInputs, ratio: float = 0.2, **_: float) -> dict[str, Tensor]:
    """``weight`` [B, R]: N / K on the K tokens of highest entropy of the mini-batch's N, 0 on the others.

    K = ceil(ratio N), and more where several have the smallest entropy of these. The mean over all tokens of weighted
    losses is the mean over the K.
    """
    if not 0 < ratio <= 1:
        raise ValueError(f"ratio={ratio}: must be in (0, 1]")
    mask, entropy = mini_batch.response_mask, mini_batch.old_entropy
    assert entropy is not None, "asked for below"
    values = entropy[mask]
    threshold = values.topk(math.ceil(ratio * len(values))).values[-1]
    kept = mask & (entropy >= threshold)
    return {"weight": kept.float() * (len(values) / kept.sum())}


@policy_loss(columns=("old_entropy",), prepare=top_entropy_weights)
def top_entropy_loss(
    inputs: LossInputs, ratio: float = 0.2, clip_low: float = 0.2, clip_high: float = 0.28
) -> tuple[Tensor, dict[str, Tensor]]:
    """Per-token clipped surrogate of PPO on the tokens of highest entropy of the mini-batch, times N / K.

    Entropies are those of the policy before the update, and the quantile that of the whole mini-batch, so that neither
    micro-batches nor workers change it; with ``loss_agg_mode=token-mean`` the loss is the mean over the kept tokens.

    Args:
        inputs: see :class:`verl.algorithms.losses.LossInputs`.
        ratio: share of tokens that are kept, in (0, 1]; 0.2 in the paper. Read by :func:`top_entropy_weights`.
        clip_low: the ratio is clipped below at 1 - clip_low.
        clip_high: and above at 1 + clip_high.
    """
    weights, mask = inputs.prepared["weight"], inputs.response_mask
    given = (inputs.logprobs, inputs.old_logprobs, inputs.advantages)
    losses, metrics = ppo_clip_loss(*given, mask, clip_low, clip_high)
    return torch.where(mask, losses * weights, 0.0), metrics | {"top_entropy_kept": (mask & (weights > 0)).sum()}
