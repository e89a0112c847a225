"""Policy filtration: which responses PPO learns from (PF-PPO, arXiv 2409.06957)."""

import torch
from torch import Generator, Tensor

EPS = 1e-8


def resampling_weights(rewards: Tensor, method: str, power: float) -> Tensor:
    """How often each response is drawn, ``[B]`` float64 above 0, up to a factor.

    Rewards that a reward model is surest of, the highest and lowest, are the most reliable. ``pow``: |r|^power.
    ``max_min``: 1 for the largest and the smallest reward of the batch, else 0. ``max_random``: 0.4 for the largest,
    else 0.1. Every weight is 1e-8 larger than that.

    Args:
        rewards: ``[B]``, of whole responses.
        method: ``pow``, ``max_min`` or ``max_random``.
        power: exponent of ``pow``.
    """
    rewards = rewards.double()
    largest, smallest = rewards == rewards.max(), rewards == rewards.min()
    weights = {
        "pow": rewards.abs() ** power,
        "max_min": (largest | smallest).double(),
        "max_random": torch.where(largest, 0.4, 0.1).double(),
    }
    return weights[method] + EPS


def resampled_rows(rewards: Tensor, learned: Tensor, method: str, power: float, generator: Generator) -> Tensor:
    """``[B']`` int64, rows drawn with replacement by :func:`resampling_weights`.

    They are drawn from those that are true in ``learned [B]``, as many as these; if there are none, all rows once.
    """
    candidates = learned.nonzero().flatten()
    if not len(candidates):
        return torch.arange(len(rewards))
    weights = resampling_weights(rewards[candidates], method, power)
    return candidates[weights.multinomial(len(candidates), replacement=True, generator=generator)]
