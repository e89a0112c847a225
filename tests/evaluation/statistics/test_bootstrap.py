import math

import pytest
import torch

from verl.evaluation.statistics.bootstrap import bootstrap_means, macro_estimates, mean_estimates


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
    (paired,) = mean_estimates(better - hard)
    assert paired.value == pytest.approx(0.1)
    # standard error sqrt(0.1 * 0.9 / 100) = 0.03; unpaired it would be sqrt(0.25 / 100 + 0.24 / 100) = 0.07
    assert (paired.low, paired.high) == pytest.approx((0.04, 0.16), abs=0.011)
    (same,) = mean_estimates(hard - hard)
    assert (same.value, same.low, same.high) == (0.0, 0.0, 0.0)


def test_one_seed_one_interval_in_any_block_size(monkeypatch: pytest.MonkeyPatch):
    values = torch.rand(50, 2, generator=torch.Generator().manual_seed(1))
    assert mean_estimates(values, seed=3) == mean_estimates(values, seed=3)
    assert mean_estimates(values, seed=3) != mean_estimates(values, seed=4)
    whole = bootstrap_means(values, 100, seed=3)
    monkeypatch.setattr("verl.evaluation.statistics.bootstrap.MAX_BLOCK", 700)
    torch.testing.assert_close(bootstrap_means(values, 100, seed=3), whole, rtol=1e-12, atol=0)
    # Columns see the same draws.
    means = bootstrap_means(values[:, :1] * torch.tensor([1.0, 2.0]), 50)
    torch.testing.assert_close(means[:, 1], 2 * means[:, 0])


def test_a_macro_average_gives_every_benchmark_the_same_weight():
    # Standard errors 0.5 / sqrt(100) and 0: the average is off by half of the first.
    values = [torch.tensor([0.0, 1.0] * 50)[:, None], torch.ones(400, 1)]
    (estimate,) = macro_estimates(values, [1, 2])
    assert estimate.value == 0.75
    assert (estimate.low, estimate.high) == pytest.approx((0.701, 0.799), abs=5e-3)
    # One problem has no interval.
    (estimate,) = macro_estimates([torch.tensor([[0.25]]), torch.tensor([[0.5], [1.0]])], [0, 0])
    assert estimate.value == 0.5 and math.isnan(estimate.low) and math.isnan(estimate.high)
