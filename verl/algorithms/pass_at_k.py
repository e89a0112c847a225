"""Estimators of an evaluation with several samples per problem: pass@k, maj@k, and bootstrap intervals over problems.

P: number of problems. K: number of columns, for example one per k. D: number of bootstrap draws.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

DRAWS = 4000
"""Resamplings behind an interval. The ends of a 95% interval are then half a percentile off at most, mostly."""

LEVEL = 0.95
"""Share of such intervals that hold the true value."""

NEGLIGIBLE = 1e-17
"""Numbers of votes that are less likely are skipped: what they add is lost in float64."""

MAX_BLOCK = 1 << 22
"""Problems times draws that are resampled at once: 32 MiB."""


Array = NDArray[Any]


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


def majority_at_k(classes: Sequence[int], correct_class: int | None, k: int) -> float:
    """Probability that a vote among k samples elects the correct answer: the exact mean over all subsets of k.

    Every sample votes for its answer's class; the class with the most votes wins; of several with the most, one is
    chosen at random with equal chances. Nothing is elected where nobody votes.

    Args:
        classes: one id per sample, equal for equivalent answers; a negative id is a sample without an answer, which
            counts among the k but does not vote.
        correct_class: the id of the correct answer; None where no sample gave it.
        k: from 1 to the number of samples.

    Raises:
        ValueError: k out of range.
    """
    if not 1 <= k <= len(classes):
        raise ValueError(f"k={k}: must lie between 1 and the number of samples ({len(classes)})")
    votes = Counter(answer for answer in classes if answer >= 0)
    supporters = votes.pop(correct_class, 0) if correct_class is not None else 0
    if supporters == 0 or k == 1:
        return supporters / len(classes)
    return _election(len(classes), k, supporters, tuple(sorted(votes.values())))


@lru_cache(maxsize=65536)
def _election(n: int, k: int, supporters: int, rivals: tuple[int, ...]) -> float:
    """The probability that ``supporters`` of n samples win among k, against rival classes of these sizes.

    Instead of a subset of exactly k, let every sample come with probability k/n, independently, and condition on k
    having come: the same distribution, in which classes are independent. So the generating function of who comes
    besides the supporters is a product over classes, taken here at roots of unity, where nothing exceeds 1 and an
    inverse transform gives its coefficients to about 1e-13. With t rivals that tie, the supporters win one time in
    1 + t, which is the integral of y^t from 0 to 1: a Gauss rule with enough points is exact.

    Q: pairs of the supporters' votes v and a point y of its rule. F: roots of unity in the upper half plane; the
    others are their conjugates.
    """
    share, rest = k / n, n - supporters
    support, others = _binomial(supporters, share), _binomial(rest, share)
    largest = rivals[-1] if rivals else 0
    # With more votes than the largest class has members, nobody can win or tie.
    safe = np.arange(max(largest + 1, k - rest), min(k, supporters) + 1)
    total = support[safe] @ others[k - safe]
    contested = np.arange(1, min(k, supporters, largest) + 1)
    contested = contested[support[contested] >= NEGLIGIBLE]
    if len(contested):
        threats = len(rivals) - np.searchsorted(rivals, contested)
        ties = np.minimum(threats, k // contested - 1)
        rules = [_unit_rule(1 + degree // 2) for degree in ties.tolist()]
        votes = np.repeat(contested, [len(points) for points, _ in rules])
        y, weights = np.concatenate([p for p, _ in rules]), np.concatenate([w for _, w in rules])
        product = _rest_at_roots(rest, share, votes, y, Counter(rivals))
        total += support[votes] * weights @ _coefficients(product, k - votes, rest + 1)
    return min(1.0, max(0.0, float(total / _binomial(n, share)[k])))


def _rest_at_roots(rest: int, share: float, votes: Array, y: Array, rivals: Counter[int]) -> Array:
    """Generating functions ``[Q, F]`` of how many of ``rest`` samples come, where no rival has more than ``votes``;
    each rival that has as many counts as ``y``. ``rivals``: size of a class -> how many classes have it."""
    order, roots = rest + 1, _roots_of_unity(rest + 1)
    half = np.arange(order // 2 + 1)
    # Whole turns are left out, so that high powers are as exact as low ones.
    powers = roots[np.arange(max(rivals) + 1)[:, None] * half % order]
    # Rivals with fewer members than votes can neither win nor tie: they fill up, like the samples that do not vote.
    fillers = rest - sum(size * count * (votes <= size) for size, count in rivals.items())
    kinds, kind = np.unique(fillers, return_inverse=True)
    one = 1 - share + share * roots[half]
    product: Array = (np.abs(one) ** kinds[:, None] * np.exp(1j * np.angle(one) * kinds[:, None]))[kind]
    for size, count in rivals.items():
        rows = int(np.searchsorted(votes, size, side="right"))  # votes ascend
        if rows == 0:
            continue
        terms = _binomial(size, share)[:, None] * powers[: size + 1]
        fewer = np.cumsum(terms, axis=0)
        factor = fewer[votes[:rows] - 1] + y[:rows, None] * terms[votes[:rows]]
        for _ in range(count):
            product[:rows] *= factor
    return product


def _coefficients(values: Array, degrees: Array, order: int) -> Array:
    """Of each real polynomial of degree below ``order``, given at the upper roots of unity, the one of its degree."""
    half = np.arange(order // 2 + 1)
    # Roots off the real axis stand for two.
    times = np.where((half == 0) | (2 * half == order), 1.0, 2.0)
    conjugates = _roots_of_unity(order)[-degrees[:, None] * half % order]
    found: Array = (values * conjugates).real @ times / order
    found[degrees >= order] = 0.0
    return found


@lru_cache(maxsize=512)
def _roots_of_unity(order: int) -> Array:
    """The points ``[order]`` at which a discrete Fourier transform evaluates a polynomial."""
    roots: Array = np.exp(-2j * math.pi / order * np.arange(order))
    return roots


@lru_cache(maxsize=512)
def _unit_rule(points: int) -> tuple[Array, Array]:
    """Points and weights on [0, 1] that integrate polynomials of degree ``2 * points - 1`` exactly."""
    x, weights = np.polynomial.legendre.leggauss(points)
    return (x + 1) / 2, weights / 2


@lru_cache(maxsize=8192)
def _binomial(trials: int, share: float) -> Array:
    """Probabilities of 0, 1, ... ``trials`` successes: ``[trials + 1]``."""
    if share == 1:
        sure: Array = np.eye(trials + 1)[-1]
        return sure
    logs, i = _log_factorials(trials), np.arange(trials + 1)
    chances: Array = np.exp(logs[-1] - logs - logs[::-1] + i * math.log(share) + (trials - i) * math.log1p(-share))
    return chances


@lru_cache(maxsize=512)
def _log_factorials(largest: int) -> Array:
    return np.array([math.lgamma(i + 1) for i in range(largest + 1)])


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
