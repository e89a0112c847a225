"""maj@k: the exact probability that a vote among k of a problem's samples elects the correct answer."""

import math
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from verl.rewards.answers import normalise, plain_number

NEGLIGIBLE = 1e-17
"""Numbers of votes that are less likely are skipped: their share is lost in float64."""

Array = NDArray[Any]


class Answered(Protocol):
    """A response that was verified."""

    @property
    def correct(self) -> bool: ...

    @property
    def answer(self) -> str:
        """What the verifier found in the response; empty if it found nothing."""


def majority_at_k(classes: Sequence[int], correct_class: int | None, k: int) -> float:
    """Probability that a vote among k samples elects the correct answer: the exact mean over all subsets of k.

    Every sample votes for its answer's class, and the class with the most votes wins; ties are broken at random with
    equal chances. Without votes nothing is elected.

    Args:
        classes: one id per sample, equal for equivalent answers; a negative id marks a sample without an answer, which
            counts among the k but does not vote.
        correct_class: the id of the correct answer; None if no sample gave it.
        k: from 1 to the number of samples.

    Raises:
        ValueError: k out of range.
    """
    if not 1 <= k <= len(classes):
        raise ValueError(f"k={k}: must be between 1 and the number of samples ({len(classes)})")
    votes = Counter(answer for answer in classes if answer >= 0)
    supporters = votes.pop(correct_class, 0) if correct_class is not None else 0
    if supporters == 0 or k == 1:
        return supporters / len(classes)
    return _election(len(classes), k, supporters, tuple(sorted(votes.values())))


def answer_classes(samples: Sequence[Answered]) -> tuple[list[int], int | None]:
    """Class ids for a vote, one per sample, and the id of the correct answer (None if no sample is correct).

    Correct samples form one class: their answers equal the reference answer. The others are grouped by their normalised
    answers, plain numbers by value. A wrong sample without an answer is -1.
    """
    ids: dict[object, int] = {}
    classes = []
    for sample in samples:
        if sample.correct:
            classes.append(0)
            continue
        text = normalise(sample.answer.strip())
        number = plain_number(text)
        key = text if number is None else number
        classes.append(ids.setdefault(key, len(ids) + 1) if text else -1)
    return classes, 0 if 0 in classes else None


@lru_cache(maxsize=65536)
def _election(n: int, k: int, supporters: int, rivals: tuple[int, ...]) -> float:
    """Probability that ``supporters`` of n samples win a vote among k, against rival classes of these sizes.

    Instead of drawing exactly k samples, draw each one independently with probability k/n and condition on k being
    drawn: the distribution is the same, and classes become independent. The generating function of how many samples
    besides the supporters are drawn is then a product over classes. It is evaluated at roots of unity, where nothing
    exceeds 1 and an inverse transform gives its coefficients to about 1e-13. Against t tied rivals the supporters win
    with probability 1 / (1 + t), the integral of y^t from 0 to 1, for which a Gauss rule with enough points is exact.

    Q: pairs of the supporters' votes v and a point y of its rule. F: roots of unity in the upper half plane; the
    others are their conjugates.
    """
    # 1. Probabilities of how many supporters, and how many other samples, are drawn.
    share, rest = k / n, n - supporters
    support, others = _binomial(supporters, share), _binomial(rest, share)
    largest = rivals[-1] if rivals else 0
    # 2. More votes than the largest rival class has members: the supporters win.
    safe = np.arange(max(largest + 1, k - rest), min(k, supporters) + 1)
    total = support[safe] @ others[k - safe]
    # 3. Fewer votes: sum over the supporters' votes and the points of their rules.
    contested = np.arange(1, min(k, supporters, largest) + 1)
    contested = contested[support[contested] >= NEGLIGIBLE]
    if len(contested):
        threats = len(rivals) - np.searchsorted(rivals, contested)
        ties = np.minimum(threats, k // contested - 1)
        rules = [_unit_rule(1 + degree // 2) for degree in ties.tolist()]
        votes = np.repeat(contested, [len(points) for points, _ in rules])
        y, weights = np.concatenate([p for p, _ in rules]), np.concatenate([w for _, w in rules])
        product = _rest_at_roots(rest, share, votes, y, Counter(rivals))
        # 4. Pick the coefficient where all others together are k - v.
        total += support[votes] * weights @ _coefficients(product, k - votes, rest + 1)
    # 5. Condition on k samples being drawn.
    return min(1.0, max(0.0, float(total / _binomial(n, share)[k])))


def _rest_at_roots(rest: int, share: float, votes: Array, y: Array, rivals: Counter[int]) -> Array:
    """Generating functions ``[Q, F]`` of how many of ``rest`` samples are drawn, none of the rivals with more than
    ``votes``; every rival with exactly ``votes`` contributes a factor ``y``. ``rivals``: class size -> number of
    classes of that size."""
    order, roots = rest + 1, _roots_of_unity(rest + 1)
    half = np.arange(order // 2 + 1)
    # Exponents modulo the order keep high powers as exact as low ones.
    powers = roots[np.arange(max(rivals) + 1)[:, None] * half % order]
    # Rivals with fewer members than votes can neither win nor tie; they count like samples that do not vote.
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
    """Coefficients of real polynomials of degree below ``order``, one each, from their values at the upper roots."""
    half = np.arange(order // 2 + 1)
    # Roots off the real axis also represent their conjugates.
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
