import math
from collections import Counter
from fractions import Fraction
from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.algorithms.pass_at_k import (
    bootstrap_means,
    difference_estimates,
    majority_at_k,
    mean_estimates,
    pass_at_k,
    percentile_interval,
)


def one(n: int, c: int, k: int) -> float:
    return pass_at_k(torch.tensor([n]), torch.tensor([c]), k).item()


def pass_by_enumeration(n: int, c: int, k: int) -> Fraction:
    subsets = list(combinations([True] * c + [False] * (n - c), k))
    return Fraction(sum(any(subset) for subset in subsets), len(subsets))


def majority_by_enumeration(classes: list[int], correct: int | None, k: int) -> Fraction:
    won = Fraction(0)
    subsets = list(combinations(classes, k))
    for subset in subsets:
        votes = Counter(answer for answer in subset if answer >= 0)
        leaders = [answer for answer, count in votes.items() if count == max(votes.values())]
        if correct in leaders:
            won += Fraction(1, len(leaders))
    return won / len(subsets)


@pytest.mark.parametrize("n", range(1, 10))
def test_pass_at_k_is_the_mean_over_all_subsets(n: int):
    for c in range(n + 1):
        for k in range(1, n + 1):
            assert one(n, c, k) == pytest.approx(float(pass_by_enumeration(n, c, k)), abs=1e-14)


def test_pass_at_k_of_literal_counts():
    # 1 - C(3, 2) / C(5, 2) = 0.7; problems may have different numbers of samples
    values = pass_at_k(torch.tensor([5, 4, 2]), torch.tensor([2, 1, 0]), 2)
    assert values.dtype == torch.float64
    assert values.tolist() == pytest.approx([0.7, 0.5, 0.0], abs=1e-15)


def test_pass_at_k_where_binomials_overflow():
    exact = 1 - Fraction(math.comb(19990, 10000), math.comb(20000, 10000))
    assert one(20000, 10, 10000) == pytest.approx(float(exact), rel=1e-12)


@pytest.mark.parametrize(
    ("n", "c", "k", "words"),
    [
        (4, 1, 5, "k=5: a problem has only 4 samples; set k<=4"),
        (4, 1, 0, "k=0: must be at least 1"),
        (4, 5, 1, "num_correct"),
        (4, -1, 1, "num_correct"),
        (0, 0, 1, "k=1: a problem has only 0 samples"),
    ],
)
def test_counts_out_of_range(n: int, c: int, k: int, words: str):
    with pytest.raises(ValueError, match=words):
        pass_at_k(torch.tensor([9, n]), torch.tensor([3, c]), k)


def test_no_problems_give_no_values():
    assert pass_at_k(torch.tensor([], dtype=torch.long), torch.tensor([], dtype=torch.long), 3).shape == (0,)


@given(st.integers(1, 300).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))))
@settings(max_examples=50, deadline=None)
def test_pass_at_k_rises_from_the_mean_to_any_correct(counts: tuple[int, int]):
    n, c = counts
    values = [one(n, c, k) for k in range(1, n + 1)]
    assert values[0] == pytest.approx(c / n, abs=1e-14)
    assert values[-1] == float(c > 0)
    assert all(0 <= value <= 1 for value in values)
    assert values == sorted(values)


CLASSES = [
    [0, 0, 0, 1, 1, 2],
    [0, 1, 1, 1, 2, 2, 2],
    [0, 0, 1, 1, -1, -1],
    [0, -1, -1],
    [0, 1, 2, 3, 4, 5, 6],
    [0, 0, 0, 0],
    [0, 0, 1, 1, 2, 2, 3, 3, -1],
]


@pytest.mark.parametrize("classes", CLASSES)
def test_majority_is_the_mean_over_all_subsets(classes: list[int]):
    for correct in {*classes, None} - {-1}:
        for k in range(1, len(classes) + 1):
            exact = float(majority_by_enumeration(classes, correct, k))
            assert majority_at_k(classes, correct, k) == pytest.approx(exact, abs=1e-12)


@given(st.lists(st.integers(-1, 4), min_size=1, max_size=9), st.data())
@settings(max_examples=80, deadline=None)
def test_majority_of_random_votes(classes: list[int], data: st.DataObject):
    k = data.draw(st.integers(1, len(classes)))
    exact = float(majority_by_enumeration(classes, 0, k))
    assert majority_at_k(classes, 0, k) == pytest.approx(exact, abs=1e-12)


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
    [
        (1, [1] * 20),
        (5, [3, 3, 2, 2, 1, 1, 1]),
        (12, [12, 12, 12, 12]),
        (20, [30, 6]),
        (30, [20, 5, 1]),
        (64, []),
    ],
)
def test_majority_of_64_is_the_mean_over_all_subsets(supporters: int, rivals: list[int], k: int):
    classes = [0] * supporters + [i for i, size in enumerate(rivals, start=1) for _ in range(size)]
    classes += [-1] * (64 - len(classes))
    exact = majority_by_counting(64, k, supporters, rivals)
    assert majority_at_k(classes, 0, k) == pytest.approx(exact, abs=1e-12)


def test_majority_ties_share_the_prize():
    assert majority_at_k([0, 1, 2], 0, 3) == pytest.approx(1 / 3)
    assert majority_at_k([0, 0, 1, 1, 2], 0, 5) == pytest.approx(1 / 2)


def test_one_vote_is_the_mean_correctness():
    assert majority_at_k([0, 0, 0, 1, 2, 3, -1, -1], 0, 1) == pytest.approx(3 / 8)


def test_who_gives_no_answer_does_not_vote():
    assert majority_at_k([0, -1, -1, -1], 0, 4) == 1.0
    assert majority_at_k([-1, -1], None, 2) == 0.0
    assert majority_at_k([1, 1, 2], None, 2) == 0.0


def test_majority_of_many_samples():
    # Two classes of 2048 (more than a float's binomials hold): by symmetry each wins half the votes.
    assert majority_at_k([0, 1] * 2048, 0, 64) == pytest.approx(0.5, abs=1e-9)
    # 256 different answers never agree: the winner is one of the k at random, so it is the correct one in 1 of 256.
    assert majority_at_k(list(range(256)), 0, 128) == pytest.approx(1 / 256, rel=1e-9)


@pytest.mark.parametrize("k", [0, 4])
def test_majority_k_out_of_range(k: int):
    with pytest.raises(ValueError, match=f"k={k}: must lie between 1 and the number of samples"):
        majority_at_k([0, 0, 1], 0, k)


def test_an_interval_of_many_problems_is_the_normal_one():
    # 400 ones of 1000: standard error sqrt(0.24 / 1000) = 0.01549, so 0.4 -+ 1.96 * 0.01549
    (estimate,) = mean_estimates(torch.tensor([1.0] * 400 + [0.0] * 600)[:, None])
    assert estimate.value == pytest.approx(0.4)
    assert (estimate.low, estimate.high) == pytest.approx((0.3696, 0.4304), abs=2e-3)


def test_intervals_hold_the_truth_about_as_often_as_they_say():
    # 60 problems, each solved with its own probability: of 400 evaluations, 95% +- 3 standard errors of 1.1%.
    generator = torch.Generator().manual_seed(0)
    held = 0
    for trial in range(400):
        chances = torch.rand(60, generator=generator)
        solved = torch.bernoulli(chances, generator=generator)
        (estimate,) = mean_estimates(solved[:, None], num_draws=500, seed=trial)
        held += estimate.low <= 0.5 <= estimate.high
    assert 0.90 < held / 400 < 0.985


def test_pairing_removes_what_both_runs_share():
    # The second run solves ten problems more of 100; what the others are does not matter.
    hard = torch.tensor([0.0, 1.0] * 50)[:, None]
    better = hard.clone()
    better[:20] = 1.0
    (paired,) = difference_estimates(hard, better)
    assert paired.value == pytest.approx(0.1)
    # standard error sqrt(0.1 * 0.9 / 100) = 0.03; unpaired it would be sqrt(0.25 / 100 + 0.24 / 100) = 0.07
    assert (paired.low, paired.high) == pytest.approx((0.04, 0.16), abs=0.011)
    (same,) = difference_estimates(hard, hard)
    assert (same.value, same.low, same.high) == (0.0, 0.0, 0.0)


def test_differences_are_on_the_same_problems():
    with pytest.raises(ValueError, match="must be on the same problems"):
        difference_estimates(torch.zeros(3, 1), torch.zeros(4, 1))


def test_one_seed_one_interval_in_any_block_size(monkeypatch: pytest.MonkeyPatch):
    values = torch.rand(50, 2, generator=torch.Generator().manual_seed(1))
    assert mean_estimates(values, seed=3) == mean_estimates(values, seed=3)
    assert mean_estimates(values, seed=3) != mean_estimates(values, seed=4)
    whole = bootstrap_means(values, 100, seed=3)
    monkeypatch.setattr("verl.algorithms.pass_at_k.MAX_BLOCK", 700)
    torch.testing.assert_close(bootstrap_means(values, 100, seed=3), whole, rtol=1e-12, atol=0)


def test_columns_see_the_same_draws():
    values = torch.rand(20, 1, generator=torch.Generator().manual_seed(1))
    means = bootstrap_means(values.repeat(1, 2) * torch.tensor([1.0, 2.0]), 50)
    torch.testing.assert_close(means[:, 1], 2 * means[:, 0])


def test_one_problem_has_no_interval():
    (estimate,) = mean_estimates(torch.tensor([[0.25]]))
    assert estimate.value == 0.25 and math.isnan(estimate.low) and math.isnan(estimate.high)


def test_refusals():
    with pytest.raises(ValueError, match="values: no problems"):
        bootstrap_means(torch.zeros(0, 1))
    with pytest.raises(ValueError, match="level=1.0"):
        percentile_interval(torch.zeros(5, 1), level=1.0)
