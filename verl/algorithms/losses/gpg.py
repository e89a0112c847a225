"""The plain policy gradient: GPG (arXiv 2504.02546), and REINFORCE."""

import torch
from torch import Tensor

from verl.algorithms.losses.tokens import masked_tokens, token_sums


def gpg_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, response_mask: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Per-token loss -A logprobs: no probability ratio, so nothing is clipped and later mini-batches are off policy.

    Only the gradient of the loss is meaningful, not its value; ``old_logprobs`` is for the metrics alone.
    """
    mask, log_ratio, advantages = masked_tokens(logprobs, old_logprobs, advantages, response_mask)
    return -advantages * torch.where(mask, logprobs, 0.0), token_sums(log_ratio, mask)
