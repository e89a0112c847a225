"""Group sequence policy optimisation: GSPO (arXiv 2507.18071), in its per-token form GSPO-token."""

import torch
from torch import Tensor

from verl.algorithms.losses.tokens import clipped_surrogate, masked_tokens, token_sums


def gspo_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, response_mask: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Per-token loss -min(s A, clip(s, 1 - clip_low, 1 + clip_high) A) with one ratio per response.

    The ratio of response i is s_i = exp(mean over its tokens of (logprobs - old_logprobs)). Token t uses
    s_{i,t} = sg[s_i] exp(logp_t - sg[logp_t]), where sg stops the gradient: its value is s_i, and its gradient is s_i
    times that of logp_t, so every token of a response has the same weight. With the same advantage on all tokens of a
    response, ``sequence_mean`` of these losses has the value and gradient of the paper's sequence objective.

    Clipping acts on whole responses. A mean over tokens varies far less than one token's ratio: the paper's ranges are
    about 3e-4, not 0.2. ``clip_low`` is in [0, 1], ``clip_high`` at least 0.
    """
    mask, log_ratio, advantages = masked_tokens(logprobs.detach(), old_logprobs, advantages, response_mask)
    # log s_i.
    sequence_log_ratio = log_ratio.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
    # log s_{i,t}: the difference in brackets is exactly 0 and carries the gradient.
    logprobs = torch.where(mask, logprobs, 0.0)
    token_log_ratio = sequence_log_ratio + (logprobs - logprobs.detach())
    losses, clipped = clipped_surrogate(token_log_ratio, advantages, clip_low, clip_high)
    return losses, token_sums(log_ratio, mask, pg_clipfrac=clipped)
