"""Soft overlong punishment: long responses lose score before they are cut off (DAPO, arXiv 2503.14476, eq. 13)."""

import torch
from torch import Tensor


def overlong_penalty(lengths: Tensor, max_length: int, buffer: int, factor: float) -> Tensor:
    """Penalty to add to the scores: 0 up to ``max_length - buffer`` tokens, then linear down to ``-factor`` (eq. 13).

    Eq. 13 has factor 1. A response longer than ``max_length`` counts as one of that length.

    Args:
        lengths: response lengths in tokens, ``[B]``.
        max_length: the longest response allowed, in tokens.
        buffer: tokens over which the penalty grows, in 1..``max_length``.
        factor: the largest penalty in units of reward, at least 0.

    Returns:
        ``[B]`` float64, in [-factor, 0].
    """
    excess = (lengths.double() - (max_length - buffer)) / buffer
    return -factor * torch.clamp(excess, 0.0, 1.0)
