"""Estimators of an evaluation with several samples per problem: pass@k and bootstrap intervals over problems.

P: number of problems. K: number of columns, for example one per k. D: number of bootstrap draws.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

DRAWS = 4000
"""Resamplings behind an interval. The ends of a 95% interval are then half a percentile off at most, mostly."""

LEVEL = 0.95
"""Share of such intervals that hold the true value."""

MAX_BLOCK = 1 << 22
"""Problems times draws that are resampled at once: 32 MiB."""


@dataclass(frozen=True)
class Estimate:
    """A mean over problems and its bootstrap interval; the bounds are NaN where one problem alone was seen."""

    value: float
    low: float
    high: float


def pass_at_k(num_samples: Tensor, num_correct: Tensor, k: int) -> Tensor:
    """Probability that at least one of k samples is correct, per problem: 1 - C(n-c, k) / C(n, k).

    Equation 1 of Chen et al. 2021 (arXiv 2107.03374): the mean over all subsets of k of the n samples, without bias.
    The ratio is taken as a product of k factors between 0 and 1, so no binomial is ever formed.

    Args:
        num_samples: n ``[P]``, may differ between problems.
        num_correct: c ``[P]``, from 0 to n.
        k: at least 1 and at most the smallest n.

    Returns:
        float64 ``[P]``.

    Raises:
        ValueError: k out of range, or c of n.
    """
    require_counts(num_samples, num_correct, k)
    n, c = num_samples.double()[:, None], num_correct.double()[:, None]
    i = torch.arange(k, dtype=torch.float64)
    return 1 - ((n - c - i).clamp(min=0) / (n - i)).prod(dim=1)


def require_counts(num_samples: Tensor, num_correct: Tensor, k: int) -> None:
    """Raise ``ValueError`` unless 1 <= k <= n and 0 <= c <= n for every problem."""
    if k < 1:
        raise ValueError(f"k={k}: must be at least 1")
    fewest = int(num_samples.min()) if len(num_samples) else k
    if k > fewest:
        raise ValueError(f"k={k}: a problem has only {fewest} samples; set k<={fewest} or draw more samples")
    if bool(((num_correct < 0) | (num_correct > num_samples)).any()):
        raise ValueError("num_correct: must lie between 0 and the number of samples")


def bootstrap_means(values: Tensor, num_draws: int = DRAWS, seed: int = 0) -> Tensor:
    """Means over problems drawn with replacement: ``values [P, K]`` -> float64 ``[D, K]``.

    All columns see the same draws. What two runs reach on the same problems is compared by passing the differences.

    Raises:
        ValueError: no problems.
    """
    num_problems = len(values)
    if num_problems == 0:
        raise ValueError("values: no problems to draw from")
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


def percentile_interval(means: Tensor, level: float = LEVEL) -> Tensor:
    """The central interval that holds ``level`` of the draws: ``means [D, K]`` -> low and high, ``[2, K]``."""
    if not 0 < level < 1:
        raise ValueError(f"level={level}: must lie between 0 and 1")
    ends = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64)
    return means.quantile(ends, dim=0)


def mean_estimates(values: Tensor, level: float = LEVEL, num_draws: int = DRAWS, seed: int = 0) -> list[Estimate]:
    """Mean and percentile bootstrap interval of each column of ``values [P, K]``."""
    means = values.double().mean(dim=0)
    if len(values) == 1:
        return [Estimate(float(mean), math.nan, math.nan) for mean in means]
    low, high = percentile_interval(bootstrap_means(values, num_draws, seed), level)
    return [Estimate(*row) for row in torch.stack([means, low, high], dim=1).tolist()]


def difference_estimates(
    first: Tensor, second: Tensor, level: float = LEVEL, num_draws: int = DRAWS, seed: int = 0
) -> list[Estimate]:
    """``second - first`` on the same problems, ``[P, K]`` each.

    Problems are drawn in pairs, so what makes a problem hard for both runs does not count as noise.

    Raises:
        ValueError: shapes that differ.
    """
    if first.shape != second.shape:
        raise ValueError(f"first {tuple(first.shape)} and second {tuple(second.shape)}: must be on the same problems")
    return mean_estimates(second.double() - first.double(), level, num_draws, seed)
