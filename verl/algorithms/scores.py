"""Functions of whole responses' scores: the soft overlong punishment, and the resampling of PF-PPO."""

import torch
from torch import Generator, Tensor

WEIGHT_EPS = 1e-8


def overlong_penalty(lengths: Tensor, max_length: int, buffer: int, factor: float) -> Tensor:
    """Penalty to add to the scores, so that long responses lose score before they are cut off (arXiv 2503.14476).

    DAPO's eq. 13, where the factor is 1: 0 up to ``max_length - buffer`` tokens, then linear down to ``-factor``. A
    response longer than ``max_length`` counts as one of that length.

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


def resampling_weights(rewards: Tensor, method: str, power: float) -> Tensor:
    """How often policy filtration (PF-PPO, arXiv 2409.06957) draws each response, ``[B]`` float64, up to a factor.

    Rewards that a reward model is surest of, the highest and lowest, are the most reliable. ``pow``: |r|^power.
    ``max_min``: 1 for the largest and the smallest reward of the batch, else 0. ``max_random``: 0.4 for the largest,
    else 0.1. Every weight is 1e-8 larger than that.
    """
    rewards = rewards.double()
    largest, smallest = rewards == rewards.max(), rewards == rewards.min()
    weights = {
        "pow": rewards.abs() ** power,
        "max_min": (largest | smallest).double(),
        "max_random": torch.where(largest, 0.4, 0.1).double(),
    }
    return weights[method] + WEIGHT_EPS


def resampled_rows(rewards: Tensor, learned: Tensor, method: str, power: float, generator: Generator) -> Tensor:
    """``[B']`` int64, rows drawn with replacement by :func:`resampling_weights`.

    They are drawn from those that are true in ``learned [B]``, as many as these; if there are none, all rows once.
    """
    candidates = learned.nonzero().flatten()
    if not len(candidates):
        return torch.arange(len(rewards))
    weights = resampling_weights(rewards[candidates], method, power)
    return candidates[weights.multinomial(len(candidates), replacement=True, generator=generator)]
