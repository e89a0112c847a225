"""Soft adaptive policy optimisation: SAPO (arXiv 2511.20347)."""

import torch
from torch import Tensor

from verl.algorithms.losses.tokens import masked_tokens, probability_ratio, token_sums


def sapo_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, response_mask: Tensor, tau_pos: float, tau_neg: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Per-token loss -A sigmoid(tau (r - 1)) 4 / tau.

    A soft gate in place of clipping: at r = 1 its slope is 1, as that of r itself, and it fades on both sides the
    faster the larger tau.

    Args:
        tau_pos: temperature of the gate where A > 0, above 0; 1 in the paper.
        tau_neg: temperature elsewhere, above 0; 1.05 in the paper, as negative updates are less stable.
    """
    for name, tau in (("tau_pos", tau_pos), ("tau_neg", tau_neg)):
        if not tau > 0:
            raise ValueError(f"{name}={tau}: must be above 0")
    mask, log_ratio, advantages = masked_tokens(logprobs, old_logprobs, advantages, response_mask)
    ratio = probability_ratio(log_ratio)
    taus = torch.where(advantages > 0, tau_pos, tau_neg).to(ratio.dtype)
    gate = torch.sigmoid(taus * (ratio - 1)) * 4 / taus
    return -advantages * gate, token_sums(log_ratio, mask)
