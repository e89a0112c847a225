import math
from fractions import Fraction
from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.evaluation.statistics.pass_at_k import (
    bootstrap_means,
    difference_estimates,
    mean_estimates,
    pass_at_k,
    percentile_interval,
)


def one(n: int, c: int, k: int) -> float:
    return pass_at_k(torch.tensor([n]), torch.tensor([c]), k).item()


def pass_by_enumeration(n: int, c: int, k: int) -> Fraction:
    subsets = list(combinations([True] * c + [False] * (n - c), k))
    return Fraction(sum(any(subset) for subset in subsets), len(subsets))


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
    monkeypatch.setattr("verl.evaluation.statistics.pass_at_k.MAX_BLOCK", 700)
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
