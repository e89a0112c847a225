"""maj@k, the probability that a majority vote among k samples of a problem elects the correct answer."""

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from functools import lru_cache
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verl.algorithms.pass_at_k import nan_lowest

DRAWS = 4096
"""Maximum number of simulated votes per problem and k. The simulation's standard error is at most 0.008 per problem,
far below the sampling error of the responses."""

SEED = 0

ROUNDING = 1e-9
"""Relative difference below which two sums of weights are considered tied."""


def majority_at_k(classes: Sequence[int], correct_class: int | None, k: int) -> float:
    """Return the probability that a vote among k samples drawn without replacement elects the correct answer.

    Every sample votes for the class of its answer. Ties are broken at random. If no sample votes, no answer is elected.
    The probability is averaged over all subsets of k samples, or over ``DRAWS`` seeded random subsets if there are
    more. Raises ``ValueError`` if k is out of range.

    Args:
        classes: class id of each sample, equal for equivalent answers. A negative id marks a sample without an answer,
            which is one of the k samples but does not vote.
        correct_class: class id of the correct answer, or None if no sample gave it.
        k: number of voters, from 1 to the number of samples.
    """
    if not 1 <= k <= len(classes):
        raise ValueError(f"k={k}: must be between 1 and the number of samples ({len(classes)})")
    votes = Counter(answer for answer in classes if answer >= 0)
    supporters = votes.pop(correct_class, 0) if correct_class is not None else 0
    if supporters == 0 or k == 1:
        return supporters / len(classes)
    return _election(len(classes), k, supporters, tuple(sorted(votes.values())))


@lru_cache(maxsize=65536)
def _election(n: int, k: int, supporters: int, rivals: tuple[int, ...]) -> float:
    """Return the probability that a class of ``supporters`` samples wins a vote against classes of sizes ``rivals``."""
    sizes = [supporters, *rivals, n - supporters - sum(rivals)]
    if math.comb(n, k) <= DRAWS:
        draws = np.array(list(combinations(np.repeat(np.arange(len(sizes)), sizes), k)))
        cells = draws + len(sizes) * np.arange(len(draws))[:, None]
        counts = np.bincount(cells.ravel(), minlength=len(sizes) * len(draws)).reshape(-1, len(sizes))
    else:
        counts = np.random.default_rng(SEED).multivariate_hypergeometric(sizes, k, DRAWS, method="count")
    votes = counts[:, :-1]  # The last class does not vote.
    leads = votes == votes.max(axis=1, keepdims=True)
    return float(np.mean(leads[:, 0] * (votes[:, 0] > 0) / leads.sum(axis=1)))


def answer_classes(correct: Sequence[bool], answers: Sequence[Hashable]) -> tuple[list[int], int | None]:
    """Return the class id of each sample's answer, and that of the correct answer (None if no sample is correct).

    Correct samples form class 0, and wrong samples are grouped by answer. A sample with an empty answer has class -1
    and does not vote.
    """
    ids: dict[Hashable, int] = {}
    classes = [
        0 if right else ids.setdefault(answer, len(ids) + 1) if answer != "" else -1
        for right, answer in zip(correct, answers, strict=True)
    ]
    return classes, 0 if 0 in classes else None


def weighted_majority_at_k(classes: Sequence[int], correct_class: int | None, scores: Sequence[float], k: int) -> float:
    """Return :func:`majority_at_k` with votes weighted by sigmoid(score), as in arXiv 2206.02336.

    In a Bradley-Terry preference model, this weight is the probability that the sample is good.
    """
    columns = {answer: column for column, answer in enumerate(sorted({answer for answer in classes if answer >= 0}))}
    if correct_class not in columns:
        return 0.0
    # Samples without an answer are assigned to an extra last column.
    ids = np.array([columns.get(answer, len(columns)) for answer in classes])
    weights = 1 / (1 + np.exp(-np.clip(list(map(nan_lowest, scores)), -500, 500)))
    draws = _choices(len(ids), k)
    cells = ids[draws] + (len(columns) + 1) * np.arange(len(draws))[:, None]
    size = (len(columns) + 1) * len(draws)
    votes = np.bincount(cells.ravel(), weights[draws].ravel(), size).reshape(len(draws), -1)[:, :-1]
    most = votes.max(axis=1, keepdims=True)
    leads = (votes >= most * (1 - ROUNDING)) & (most > 0)
    return float(np.mean(leads[:, columns[correct_class]] / np.maximum(leads.sum(axis=1), 1)))


@lru_cache(maxsize=32)
def _choices(n: int, k: int) -> NDArray[Any]:
    """Return all subsets of k of n samples, or ``DRAWS`` seeded random subsets if there are more, ``[draws, k]``."""
    if math.comb(n, k) <= DRAWS:
        return np.array(list(combinations(range(n), k)))
    return np.random.default_rng(SEED).random((DRAWS, n)).argpartition(k - 1, axis=1)[:, :k].astype(np.int32)
