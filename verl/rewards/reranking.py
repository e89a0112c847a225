"""rm@k and votes weighted by a reward model: the probability that what it chooses among k samples is correct."""

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import combinations, groupby, islice
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verl.rewards.majority import DRAWS, SEED
from verl.rewards.pass_at_k import best_shares

ROUNDING = 1e-9
"""Relative difference of two sums of the same weights."""


def rm_at_k(correct: Sequence[bool], scores: Sequence[float], k: int) -> float:
    """Probability that the sample of the highest score among k, drawn without replacement, is correct.

    Samples of equal scores are chosen with equal chances.

    Args:
        scores: one per sample; those that are not numbers are the lowest.
        k: from 1 to the number of samples.

    Raises:
        ValueError: k out of range.
    """
    shares, total = iter(best_shares(len(scores), k)), 0.0
    ranked = sorted(zip(map(_ordered, scores), correct, strict=True))
    for _, group in groupby(ranked, key=lambda pair: pair[0]):
        right = [is_right for _, is_right in group]
        total += sum(islice(shares, len(right))) * fmean(right)
    return total


def weighted_majority_at_k(classes: Sequence[int], correct_class: int | None, scores: Sequence[float], k: int) -> float:
    """As :func:`verl.rewards.majority.majority_at_k`, where a sample of the score s has sigmoid(s) votes: what a model
    of preferences (Bradley and Terry) takes for the probability that it is good. (Weighted votes: arXiv 2206.02336.)
    """
    places = {answer: place for place, answer in enumerate(sorted({answer for answer in classes if answer >= 0}))}
    if correct_class not in places:
        return 0.0
    # The last place is of samples without an answer.
    ids = np.array([places.get(answer, len(places)) for answer in classes])
    weights = 1 / (1 + np.exp(-np.clip(list(map(_ordered, scores)), -500, 500)))
    chosen = _choices(len(ids), k)
    cells = ids[chosen] + (len(places) + 1) * np.arange(len(chosen))[:, None]
    size = (len(places) + 1) * len(chosen)
    votes = np.bincount(cells.ravel(), weights[chosen].ravel(), size).reshape(len(chosen), -1)[:, :-1]
    most = votes.max(axis=1, keepdims=True)
    leads = (votes >= most * (1 - ROUNDING)) & (most > 0)
    return float(np.mean(leads[:, places[correct_class]] / np.maximum(leads.sum(axis=1), 1)))


def _ordered(score: float) -> float:
    return -math.inf if math.isnan(score) else score


@lru_cache(maxsize=32)
def _choices(n: int, k: int) -> NDArray[Any]:
    """Choices of k among n, ``[DRAWS or fewer, k]``: all of them if these are at most ``DRAWS``, else seeded draws."""
    if math.comb(n, k) <= DRAWS:
        return np.array(list(combinations(range(n), k)))
    return np.random.default_rng(SEED).random((DRAWS, n)).argpartition(k - 1, axis=1)[:, :k].astype(np.int32)
