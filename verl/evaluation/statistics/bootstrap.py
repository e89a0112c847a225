"""Means over problems with bootstrap intervals.

P: number of problems. K: number of columns, for example one per k. D: number of bootstrap draws.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

DRAWS = 4000
"""Resamplings per interval. The ends of a 95% interval are then usually less than half a percentile off."""

LEVEL = 0.95
"""Share of intervals that contain the true value."""

MAX_BLOCK = 1 << 22
"""Problems times draws that are resampled at once: 32 MiB."""


@dataclass(frozen=True)
class Estimate:
    """A mean over problems and its bootstrap interval; the bounds are NaN if there was only one problem."""

    value: float
    low: float
    high: float


def bootstrap_means(values: Tensor, num_draws: int = DRAWS, seed: int = 0) -> Tensor:
    """Means over problems drawn with replacement: ``values [P, K]`` -> float64 ``[D, K]``.

    All columns share the draws. To compare two runs on the same problems, pass the differences.
    """
    num_problems = len(values)
    generator = torch.Generator().manual_seed(seed)
    block = max(1, min(num_draws, MAX_BLOCK // num_problems))
    means = []
    for start in range(0, num_draws, block):
        draws = min(block, num_draws - start)
        drawn = torch.randint(num_problems, (draws, num_problems), generator=generator)
        times = torch.zeros(draws, num_problems, dtype=torch.float64)
        times.scatter_add_(1, drawn, torch.ones_like(times))
        means.append(times @ values.double() / num_problems)
    return torch.cat(means)


def mean_estimates(values: Tensor, num_draws: int = DRAWS, seed: int = 0) -> list[Estimate]:
    """Mean and percentile bootstrap interval of each column of ``values [P, K]``."""
    return macro_estimates([values], [seed], num_draws)


def macro_estimates(benchmarks: Sequence[Tensor], seeds: Sequence[int], num_draws: int = DRAWS) -> list[Estimate]:
    """The mean over benchmarks of the means over their problems, ``[P, K]`` each, with its interval for each column.

    Problems are drawn within each benchmark, by its seed. The spread within a benchmark of one problem is unknown, so
    its average has no interval.
    """
    means = torch.stack([values.double().mean(dim=0) for values in benchmarks]).mean(dim=0)
    if any(len(values) == 1 for values in benchmarks):
        return [Estimate(mean, math.nan, math.nan) for mean in means.tolist()]
    draws = [bootstrap_means(values, num_draws, seed) for values, seed in zip(benchmarks, seeds, strict=True)]
    ends = torch.tensor([(1 - LEVEL) / 2, (1 + LEVEL) / 2], dtype=torch.float64)
    low, high = torch.stack(draws).mean(dim=0).quantile(ends, dim=0)
    return [Estimate(*row) for row in torch.stack([means, low, high], dim=1).tolist()]
