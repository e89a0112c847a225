"""80/20 rule (arXiv 2506.01939): apply policy gradients only to the tokens with the highest entropy."""

import math

import torch
from torch import Tensor

from verl.algorithms.losses import LossInputs, policy_loss, ppo_clip_loss


def top_entropy_weights(mini_batch: LossInputs, ratio: float = 0.2, **_: float) -> dict[str, Tensor]:
    """Return ``weight`` [B, R]: N / K for the K highest-entropy tokens of the mini-batch's N tokens, and 0 otherwise.

    K is ceil(ratio N), or more if there are ties at the threshold. The mean of the weighted losses over all N tokens
    equals the mean of the losses over the K tokens.
    """
    if not 0 < ratio <= 1:
        raise ValueError(f"ratio={ratio}: must be in (0, 1]")
    mask, entropy = mini_batch.response_mask, mini_batch.old_entropy
    assert entropy is not None, "top_entropy_loss declares the column"
    values = entropy[mask]
    threshold = values.topk(math.ceil(ratio * len(values))).values[-1]
    kept = mask & (entropy >= threshold)
    return {"weight": kept.float() * (len(values) / kept.sum())}


@policy_loss(columns=("old_entropy",), prepare=top_entropy_weights)
def top_entropy_loss(
    inputs: LossInputs, ratio: float = 0.2, clip_low: float = 0.2, clip_high: float = 0.28
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute PPO's clipped surrogate per token, weighted by :func:`top_entropy_weights`.

    The threshold is computed from the entropies of the whole mini-batch before the update, so it does not depend on
    micro-batches or workers. With ``loss_agg_mode=token-mean``, the loss is the mean over the kept tokens.

    Args:
        ratio: Fraction of tokens to keep, in (0, 1]; 0.2 in the paper. Used by :func:`top_entropy_weights`.
        clip_low, clip_high: Bounds of the ratio, which is clipped to [1 - clip_low, 1 + clip_high].
    """
    weights, mask = inputs.prepared["weight"], inputs.response_mask
    tokens = (inputs.logprobs, inputs.old_logprobs, inputs.advantages)
    losses, metrics = ppo_clip_loss(*tokens, mask, clip_low, clip_high)
    return torch.where(mask, losses * weights, 0.0), metrics | {"top_entropy_kept": (mask & (weights > 0)).sum()}
