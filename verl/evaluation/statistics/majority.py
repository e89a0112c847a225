"""maj@k: what a vote among k of a problem's samples elects, exactly."""

import math
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

NEGLIGIBLE = 1e-17
"""Numbers of votes that are less likely are skipped: what they add is lost in float64."""

Array = NDArray[Any]


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
