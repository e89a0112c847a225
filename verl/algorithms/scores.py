"""DAPO's soft overlong penalty on scores, and PF-PPO's resampling of responses by reward."""

import torch
from torch import Generator, Tensor

WEIGHT_EPS = 1e-8


def overlong_penalty(lengths: Tensor, max_length: int, buffer: int, factor: float) -> Tensor:
    """Return DAPO's soft overlong penalty (arXiv 2503.14476, eq. 13), which is added to the scores.

    The penalty is 0 up to ``max_length - buffer`` tokens, then falls linearly to ``-factor`` at ``max_length``.

    Args:
        lengths: response lengths in tokens, ``[B]``.
        max_length: maximum allowed response length in tokens.
        buffer: number of tokens over which the penalty grows, in 1..``max_length``.
        factor: maximum penalty in units of reward, nonnegative; 1 in the paper.

    Returns:
        ``[B]`` float64, in [-factor, 0].
    """
    excess = (lengths.double() - (max_length - buffer)) / buffer
    return -factor * torch.clamp(excess, 0.0, 1.0)


def resampling_weights(rewards: Tensor, method: str, power: float) -> Tensor:
    """Return PF-PPO's unnormalised sampling weights (arXiv 2409.06957), ``[B]`` float64.

    The weights favour the highest and lowest rewards, where a reward model is most reliable. ``pow`` uses |r|^power.
    ``max_min`` uses 1 for the batch's highest and lowest rewards and 0 for others. ``max_random`` uses 0.4 for the
    highest reward and 0.1 for others. 1e-8 is added to each weight.
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
    """Resample the B' responses selected by ``learned [B]`` with replacement and return their indices, int64 ``[B']``.

    The sampling weights are :func:`resampling_weights`. If ``learned`` is all false, all indices are returned.
    """
    candidates = learned.nonzero().flatten()
    if not len(candidates):
        return torch.arange(len(rewards))
    weights = resampling_weights(rewards[candidates], method, power)
    return candidates[weights.multinomial(len(candidates), replacement=True, generator=generator)]
