"""rm@k and weighted votes, against literals and against every choice one by one."""

import math
from itertools import combinations
from statistics import fmean

import pytest

from verl.algorithms.pass_at_k import rm_at_k
from verl.algorithms.votes import majority_at_k, weighted_majority_at_k


@pytest.mark.parametrize(
    ("correct", "scores", "k", "expected"),
    [
        # The best of 2 among 4 is the first with 3/6, the second with 2/6, the third with 1/6.
        ([True, False, False, True], [0.1, 3, 2, 1], 2, 1 / 6),
        ([True, False, False, True], [0.1, 3, 2, 1], 1, 1 / 2),
        ([True, False, False, True], [5, 3, 2, 1], 4, 1),
        # Equal scores: each of the two with 1/2.
        ([True, False], [1, 1], 2, 1 / 2),
        ([True, True, False], [1, 0, 1], 2, 1 / 2),
        ([True, False], [math.nan, -1e9], 2, 0),
        ([False], [math.nan], 1, 0),
    ],
)
def test_rm_at_k(correct: list[bool], scores: list[float], k: int, expected: float):
    assert rm_at_k(correct, scores, k) == pytest.approx(expected, abs=1e-12)


def test_rm_at_k_is_the_mean_over_all_choices():
    correct, scores = [True, False, True, True, False, False], [2.0, 2.0, -1.0, 0.5, 3.0, 2.0]
    for k in range(1, 7):
        chosen = []
        for places in combinations(range(6), k):
            best = max(scores[i] for i in places)
            chosen.append(fmean(correct[i] for i in places if scores[i] == best))
        assert rm_at_k(correct, scores, k) == pytest.approx(fmean(chosen), abs=1e-12)


@pytest.mark.parametrize(
    ("classes", "scores", "k", "expected"),
    [
        # sigmoid(log 3) = 3/4 against two times 1/4: one vote wins against two.
        ([0, 1, 1], [math.log(3), -math.log(3), -math.log(3)], 3, 1),
        ([0, 1, 1], [math.log(3), -math.log(3), -math.log(3)], 2, 2 / 3),
        # 3/4 against 3/4.
        ([0, 1, 2, 1], [math.log(3), 0, -1000, -math.log(3)], 4, 1 / 2),
        ([0, -1, -1], [-1000, 9, 9], 3, 1),
        ([0, -1], [0, 0], 1, 1 / 2),
        ([1, 1], [0, 0], 2, 0),
        ([0, 1], [math.nan, 0], 2, 0),
    ],
)
def test_weighted_votes(classes: list[int], scores: list[float], k: int, expected: float):
    correct = 0 if 0 in classes else None
    assert weighted_majority_at_k(classes, correct, scores, k) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(("n", "k", "within"), [(6, 3, 1e-12), (6, 6, 1e-12), (40, 11, 0.02)])
def test_equal_weights_are_a_vote(n: int, k: int, within: float):
    classes = [0, 1, 2, 0, -1, 1, 0, 3][: min(n, 8)] * max(1, n // 8)
    expected = majority_at_k(classes, 0, k)
    assert weighted_majority_at_k(classes, 0, [0.3] * n, k) == pytest.approx(expected, abs=within)
