"""maj@k against enumeration and exact counting."""

import math
from collections import Counter
from fractions import Fraction
from itertools import combinations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.evaluation.example_results import sample
from verl.evaluation.statistics.majority import answer_classes, majority_at_k


def majority_by_enumeration(classes: list[int], correct: int | None, k: int) -> Fraction:
    won = Fraction(0)
    subsets = list(combinations(classes, k))
    for subset in subsets:
        votes = Counter(answer for answer in subset if answer >= 0)
        leaders = [answer for answer, count in votes.items() if count == max(votes.values())]
        if correct in leaders:
            won += Fraction(1, len(leaders))
    return won / len(subsets)


@given(st.lists(st.integers(-1, 6), min_size=1, max_size=8))
@example([0, 1, 2, 3, 4, 5, 6])
@example([0, 0, 1, 1, 2, 2, 3, 3, -1])
@settings(max_examples=60, deadline=None)
def test_majority_is_the_mean_over_all_subsets(classes: list[int]):
    for correct in {*classes, None} - {-1}:
        for k in range(1, len(classes) + 1):
            exact = float(majority_by_enumeration(classes, correct, k))
            assert majority_at_k(classes, correct, k) == pytest.approx(exact, abs=1e-12)


def majority_by_counting(n: int, k: int, supporters: int, rivals: list[int]) -> float:
    """Exact in integers: subsets by the supporters' votes, how many others come, and how many rivals tie."""
    won = Fraction(0)
    for votes in range(1, min(k, supporters) + 1):
        ways = {(0, 0): math.comb(supporters, votes)}
        for size in rivals:
            grown = Counter()
            for (came, ties), count in ways.items():
                for more in range(min(size, votes) + 1):
                    grown[came + more, ties + (more == votes)] += count * math.comb(size, more)
            ways = grown
        silent = n - supporters - sum(rivals)
        for (came, ties), count in ways.items():
            if 0 <= k - votes - came <= silent:
                won += Fraction(count * math.comb(silent, k - votes - came), 1 + ties)
    return float(won / math.comb(n, k))


@pytest.mark.parametrize("k", [1, 2, 3, 8, 24, 47, 64])
@pytest.mark.parametrize(
    ("supporters", "rivals"),
    [(1, [1] * 20), (5, [3, 3, 2, 2, 1, 1, 1]), (12, [12, 12, 12, 12]), (20, [30, 6]), (30, [20, 5, 1]), (64, [])],
)
def test_majority_of_64_is_the_mean_over_all_subsets(supporters: int, rivals: list[int], k: int):
    classes = [0] * supporters + [i for i, size in enumerate(rivals, start=1) for _ in range(size)]
    classes += [-1] * (64 - len(classes))
    exact = majority_by_counting(64, k, supporters, rivals)
    assert majority_at_k(classes, 0, k) == pytest.approx(exact, abs=1e-12)


@pytest.mark.parametrize(
    ("classes", "correct", "k", "chance"),
    [
        # Ties are broken at random.
        ([0, 1, 2], 0, 3, 1 / 3),
        ([0, 0, 1, 1, 2], 0, 5, 1 / 2),
        # One vote is the mean correctness.
        ([0, 0, 0, 1, 2, 3, -1, -1], 0, 1, 3 / 8),
        # A sample without an answer does not vote.
        ([0, -1, -1, -1], 0, 4, 1.0),
        ([-1, -1], None, 2, 0.0),
        ([1, 1, 2], None, 2, 0.0),
        # Two classes of 2048, more than a float's binomials can hold: by symmetry each wins half the votes.
        ([0, 1] * 2048, 0, 64, 0.5),
        # 256 different answers never agree: the winner is one of the k at random, so the correct one in 1 of 256.
        (list(range(256)), 0, 128, 1 / 256),
    ],
)
def test_literal_chances(classes: list[int], correct: int | None, k: int, chance: float):
    assert majority_at_k(classes, correct, k) == pytest.approx(chance, rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("k", [0, 4])
def test_majority_k_out_of_range(k: int):
    with pytest.raises(ValueError, match=f"k={k}: must be between 1 and the number of samples"):
        majority_at_k([0, 0, 1], 0, k)


def test_classes_of_answers():
    samples = [
        sample("c", "1/2"),
        sample("c", "0.5"),
        sample("w", "3.0"),
        sample("w", " $3$ "),
        sample("w", "x + 1"),
        sample("w", "x+1"),
        sample("n"),
        sample("t", "3.0"),
    ]
    assert answer_classes(samples) == ([0, 0, 1, 1, 2, 2, -1, 1], 0)
    assert answer_classes([sample("w")]) == ([1], None)
    assert answer_classes([]) == ([], None)
