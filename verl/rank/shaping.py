"""Implements rank shaping, which adds a signal Phi computed from rank metrics to advantages (arXiv 2509.23808)."""

import torch
from torch import Tensor

DEVIATION_LIMIT = 5.0
DEVIATION_EPS = 1e-8


def relative_deviation(metric: Tensor, baseline: float) -> Tensor:
    """Return d = clip((m - mu) / (|mu| + 1e-8), -5, 5) for ``metric [B]``, with 0 (no signal) where m is not finite."""
    deviation = (metric - baseline) / (abs(baseline) + DEVIATION_EPS)
    return torch.where(metric.isfinite(), deviation.clamp(-DEVIATION_LIMIT, DEVIATION_LIMIT), 0.0)


def exploration_beta(guide_deviation: Tensor, hypothesis_type: str, gain: float) -> Tensor:
    """Return the share beta ``[B]`` of the exploration weights, given the guide's deviation d ``[B]``.

    The share is sigmoid(gain * d) for ``PlanB``, and 0.5 for ``FixTwo`` and ``FixOne``.
    """
    if hypothesis_type == "PlanB":
        return torch.sigmoid(gain * guide_deviation)
    return torch.full_like(guide_deviation, 0.5)


def controller_weights(beta: Tensor, w_explore: Tensor, w_exploit: Tensor, hypothesis_type: str) -> Tensor:
    """Return indicator weights ``[B, N]`` for ``beta [B]``, ``w_explore [N]`` and ``w_exploit [N]``.

    The weights are beta * w_explore + (1 - beta) * w_exploit, or w_explore + w_exploit for ``FixOne``.
    """
    if hypothesis_type == "FixOne":
        return (w_explore + w_exploit).expand(beta.shape[0], -1)
    return beta[:, None] * w_explore + (1 - beta)[:, None] * w_exploit


def auxiliary_signal(deviations: Tensor, weights: Tensor, scale: float) -> Tensor:
    """Return Phi ``[B]`` = scale * sum over indicators of w tanh(d), for ``deviations`` and ``weights`` ``[B, N]``."""
    return scale * (weights * deviations.tanh()).sum(1)


def last_token_mask(response_mask: Tensor) -> Tensor:
    """Return a mask ``[B, R]`` of each response's last token, which is all false for responses without tokens."""
    mask = response_mask.bool()
    later_tokens = mask.flip(1).cumsum(1).flip(1)
    return mask & (later_tokens == 1)


def shaped_advantages(advantages: Tensor, response_mask: Tensor, phi: Tensor, kappa: float, placement: str) -> Tensor:
    """Add the bonus min(relu(Phi), |A0| / kappa) to the advantages A0 of all response tokens or of the last one.

    The bonus is never negative and, since kappa >= 1, never flips the sign of an advantage.

    Args:
        advantages: Advantages A0 ``[B, R]``.
        response_mask: Mask ``[B, R]`` of response tokens, bool or 0/1.
        phi: Auxiliary signal ``[B]``.
        kappa: Divisor of at least 1 that limits the bonus to |A0| / kappa.
        placement: ``all_tokens`` or ``last_token``.
    """
    mask = response_mask.bool() if placement == "all_tokens" else last_token_mask(response_mask)
    bonus = torch.minimum(phi.to(advantages).relu()[:, None], advantages.abs() / kappa)
    return torch.where(mask, advantages + bonus, advantages)
