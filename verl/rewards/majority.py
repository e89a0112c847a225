"""maj@k: the probability that a vote among k of a problem's samples elects the correct answer."""

import math
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from itertools import combinations
from typing import Protocol

import numpy as np

from verl.rewards.answers import normalise
from verl.rewards.lexicon import plain_number

DRAWS = 4096
"""Most votes per problem and k. The standard error of one problem is at most 0.008, far below that of its samples."""

SEED = 0


class Answered(Protocol):
    """A response that was verified."""

    @property
    def correct(self) -> bool: ...

    @property
    def answer(self) -> str:
        """What the verifier found in the response; empty if it found nothing."""


def majority_at_k(classes: Sequence[int], correct_class: int | None, k: int) -> float:
    """Probability that a vote among k samples, drawn without replacement, elects the correct answer.

    Every sample votes for its answer's class, and the class with the most votes wins; ties are broken at random with
    equal chances. Without votes nothing is elected. The mean over all choices of k samples if these are at most
    ``DRAWS``, otherwise over as many seeded draws, the same ones whenever the votes are the same.

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


@lru_cache(maxsize=65536)
def _election(n: int, k: int, supporters: int, rivals: tuple[int, ...]) -> float:
    """Share of elections that ``supporters`` of n samples win against rival classes of these sizes, ties by halves."""
    sizes = [supporters, *rivals, n - supporters - sum(rivals)]
    if math.comb(n, k) <= DRAWS:
        chosen = np.array(list(combinations(np.repeat(np.arange(len(sizes)), sizes), k)))
        places = chosen + len(sizes) * np.arange(len(chosen))[:, None]
        counts = np.bincount(places.ravel(), minlength=len(sizes) * len(chosen)).reshape(-1, len(sizes))
    else:
        counts = np.random.default_rng(SEED).multivariate_hypergeometric(sizes, k, DRAWS, method="count")
    votes = counts[:, :-1]  # the last did not vote
    leads = votes == votes.max(axis=1, keepdims=True)
    return float(np.mean(leads[:, 0] * (votes[:, 0] > 0) / leads.sum(axis=1)))


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
