"""Bootstrap intervals, statistics of responses, and the rows that they make."""

import math

import pytest
import torch

from tests.evaluation.example_results import problem, result, with_metrics
from verl.evaluation.reranking import with_scores
from verl.evaluation.statistics import (
    AVERAGE,
    bootstrap_means,
    macro_estimates,
    mean_estimates,
    metric_spreads,
    repetition_rate,
    summarise,
)


def test_an_interval_of_many_problems_is_the_normal_one():
    # 400 ones of 1000: standard error sqrt(0.24 / 1000) = 0.01549, so 0.4 -+ 1.96 * 0.01549
    (estimate,) = mean_estimates(torch.tensor([1.0] * 400 + [0.0] * 600)[:, None])
    assert estimate.value == pytest.approx(0.4)
    assert (estimate.low, estimate.high) == pytest.approx((0.3696, 0.4304), abs=2e-3)


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
    monkeypatch.setattr("verl.evaluation.statistics.MAX_BLOCK", 700)
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
    # Shares that are the same for all problems: Wilson's interval of 0 of 12, z^2 / (12 + z^2), and of 12 of 12.
    found = macro_estimates([torch.tensor([[0.0, 1.0]]).expand(12, 2)], [0], shares=True)
    assert [(e.low, e.high) for e in found] == [(0.0, pytest.approx(0.242494)), (pytest.approx(0.757506), 1.0)]
    # In an average the parts' widths add up in squares: 0.2425 / 2 upwards of the one, 0.049 of the other.
    (estimate,) = macro_estimates([values[0], torch.zeros(12, 1)], [1, 2], shares=True)
    assert (estimate.low, estimate.high) == pytest.approx((0.201, 0.25 + math.hypot(0.121247, 0.049)), abs=5e-3)
    for n in range(2, 200):
        none, every = macro_estimates([torch.tensor([[0.0, 1.0]]).expand(n, 2)], [0], 10, shares=True)
        assert none.low == 0 and every.high == 1  # not -1e-17, which tables show as -0.0
    # One problem has no interval.
    (estimate,) = macro_estimates([torch.tensor([[0.25]]), torch.tensor([[0.5], [1.0]])], [0, 0])
    assert estimate.value == 0.5 and math.isnan(estimate.low) and math.isnan(estimate.high)


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("", 0.0),
        ("one two three", 0.0),
        ("a b c d e f", 0.0),
        ("a b c d a b c d", 1 / 5),
        ("wait " * 100, 96 / 97),
        ("答案是七。答案是七。", 2 / 7),
        ("x=1,x=1,", 1 / 5),
    ],
)
def test_repetition_rate(text: str, rate: float):
    assert repetition_rate(text) == pytest.approx(rate)


def test_metrics_are_split_by_correctness():
    found = with_metrics(result(["ccw", "wwc"]), {"Effective Rank": [1.0, 2.0, 10.0, 20.0, math.nan, 3.0]})
    spreads = metric_spreads(found.problems)["Effective Rank"]
    assert (spreads["correct"].mean, spreads["correct"].quartiles[1], spreads["wrong"].mean) == (2.0, 2.0, 15.0)
    assert {split: spread.count for split, spread in spreads.items()} == {"correct": 3, "wrong": 2, "all": 5}
    only_right = metric_spreads(with_metrics(result(["c"]), {"Curvature": [0.5]}).problems)["Curvature"]
    assert only_right["wrong"].count == 0 and math.isnan(only_right["wrong"].mean)


def value(row, k: int) -> float:
    return row.pass_at_k[k].value


def test_a_reward_model_chooses():
    # It prefers the only correct one of the first problem, and a wrong one of the second.
    scores = {(0, 0): 9.0, (0, 1): 0.0, (0, 2): 0.0, (1, 2): 9.0, (1, 0): -9.0, (1, 1): -9.0}
    scored = with_scores(result(["cww", "ccw"]), scores)
    (row,) = summarise([scored]).rows
    # Of 2 among 3 the best is among the choice in 2 of 3.
    assert [row.rm_at_k[k].value for k in (1, 2, 3)] == pytest.approx([1 / 2, (2 / 3 + 1 / 3) / 2, 1 / 2])
    # sigmoid(9) against twice 1/2; twice sigmoid(-9) against sigmoid(9); votes without weights elect the other ones.
    assert (row.rm_maj_at_k[3].value, row.maj_at_k[3].value) == (0.0, 0.5)
    assert (row.rm_at_k[3].low, row.rm_at_k[3].high) == (0.0, 1.0)
    # A sample that was not generated is chosen last; averages hold what every benchmark has.
    summary = summarise([scored, with_scores(result(["cww"], benchmark="amc23"), {(0, 1): -99.0})])
    assert summary.row("grpo@0", "amc23").rm_at_k[3].value == 0.0
    assert summary.averages[0].rm_at_k[3].value == 0.25
    assert summarise([scored, result(["cww"], benchmark="amc23")]).averages[0].rm_at_k == {}


def test_figures_of_one_result():
    (row,) = summarise([result(["cwww", "cccn", "wwww"])]).rows
    # per problem pass@1: 1/4, 3/4, 0; pass@2: 1/2, 1, 0
    assert [value(row, k) for k in (1, 2, 4)] == pytest.approx([1 / 3, 1 / 2, 2 / 3])
    # votes of 4: 8 wins; 7 wins (one abstains); 8 wins
    assert [row.maj_at_k[k].value for k in (1, 4)] == pytest.approx([1 / 3, 1 / 3])
    assert row.rm_at_k == row.rm_maj_at_k == {}
    assert (row.num_problems, row.num_missing, row.samples) == (3, 0, (4, 4))
    assert (row.mean_tokens, row.truncation_rate) == (10.0, pytest.approx(1 / 12))
    assert row.reasons == {"correct": 4, "wrong": 7, "no_answer": 1}
    assert row.baseline is None and row.differences == {}


def test_problems_with_few_samples_or_none():
    (row,) = summarise([result(["cw", "cwww", ""])]).rows
    assert list(row.pass_at_k) == [1, 2]
    # k=2: of two samples both, of four 1 - C(3,2)/C(4,2) = 1/2
    assert value(row, 2) == pytest.approx(0.75)
    assert (row.num_problems, row.num_missing, row.samples) == (2, 1, (2, 4))
    summary = summarise([result(["", ""]), result([], benchmark="empty")])
    without, empty = summary.rows
    assert (without.pass_at_k, without.num_problems, without.num_missing) == ({}, 0, 2)
    assert math.isnan(without.mean_tokens)
    assert (empty.num_problems, empty.num_missing) == (0, 0)
    assert summary.averages == [] and summary.ks() == []
    assert summarise([]).rows == []


EASY, HARD = ["cccc"] * 8 + ["wwww"] * 8, ["wwww"] * 16


def test_step_0_of_the_same_run_is_the_baseline():
    results = [result(HARD), result(EASY, step=9), result(HARD, run="verl"), result(EASY, run="verl", step=9)]
    rows = {row.label: row for row in summarise(results).rows}
    assert [rows[label].baseline for label in rows] == [None, "grpo@0", "grpo@0", "verl@0"]
    difference = rows["verl@9"].differences[1]
    assert difference.estimate.value == pytest.approx(0.5) and difference.outside_noise
    assert rows["verl@0"].differences[1].estimate.value == 0 and not rows["verl@0"].differences[1].outside_noise


def test_other_baselines():
    results = [result(HARD, run="other", step=3), result(HARD), result(EASY, step=9)]
    assert [row.baseline for row in summarise(results, "first").rows] == [None, "other@3", "other@3"]
    assert [row.baseline for row in summarise(results, "step0").rows] == [None, None, "grpo@0"]
    # A benchmark without a result of the first has none.
    results = [result(["c"], "a"), *(result(["w"], "c", benchmark=name) for name in ("aime24", "amc23"))]
    results.append(result(["c"], "b", benchmark="amc23"))
    found = {(row.label, row.benchmark): row.baseline for row in summarise(results).rows}
    assert found["c@0", "aime24"] == "a@0" and found["c@0", "amc23"] is None


def test_baselines_have_the_same_temperature():
    places = [(run, step, t) for run in "ab" for t in (0.5, 1.0) for step in (0, 9)]
    results = [result(["cw"], run, step, temperature=t) for run, step, t in places]
    rows = summarise(results).rows
    assert [row.label for row in rows[:4]] == ["a@0 T=0.5", "a@9 T=0.5", "a@0 T=1", "a@9 T=1"]
    low, high = "a@0 T=0.5", "a@0 T=1"
    assert [row.baseline for row in rows] == [None, low, low, high, low, "b@0 T=0.5", high, "b@0 T=1"]
    assert [row.baseline for row in summarise(results, "first").rows] == [None, low, low, high, low, low, high, high]


@pytest.mark.parametrize(
    ("before", "after", "direction", "outside"),
    [
        # All five that differ are newly solved: the bootstrap alone would call that a difference.
        ("w" * 10, "c" * 5 + "w" * 5, 1, False),
        ("w" * 12, "c" * 6 + "w" * 6, 1, True),
        ("c" * 12, "w" * 8 + "c" * 4, -1, True),
        ("c" * 6 + "w" * 6, "w" * 6 + "c" * 6, 0, False),
    ],
)
def test_few_problems_that_differ_are_noise(before: str, after: str, direction: int, outside: bool):
    difference = summarise([result(before), result(after, step=9)]).rows[1].differences[1]
    assert (difference.estimate.low > 0) - (difference.estimate.high < 0) == direction
    assert difference.outside_noise is outside


def test_differences_are_over_the_problems_that_both_have():
    base = result(["w", "w", problem(2, "c", question="old")])
    new = result([problem(1, "c"), problem(2, "w", question="new"), problem(3, "w")], step=9)
    row = summarise([base, new]).rows[1]
    assert row.differences[1].estimate.value == 1.0
    strangers = result([problem(7, "c")], step=8)
    assert summarise([base, strangers]).rows[1].differences == {}


def test_the_average_gives_every_benchmark_the_same_weight():
    results = [result(["cc"] * 10), result(["ww"] * 2, benchmark="amc23")]
    results += [result(["cc"] * 10, step=9), result(["cwww"] * 2, step=9, benchmark="amc23")]
    base, trained = summarise(results).averages
    assert (base.benchmark, base.num_problems, value(base, 1)) == (AVERAGE, 12, 0.5)
    assert value(trained, 1) == pytest.approx(0.625)
    assert (list(trained.pass_at_k), trained.samples) == ([1, 2], (2, 4))
    assert trained.differences[2].estimate.value == pytest.approx(0.25)
    # No problem of the first benchmark changes; the other two do, alike, so the interval has no width.
    assert trained.differences[1].estimate.low == pytest.approx(0.125)
    assert not trained.differences[1].outside_noise
    # Over benchmarks of one problem there is no interval.
    single = [result(["wc"[step]], step=step, benchmark=f"b{i}") for step in (0, 1) for i in range(6)]
    (_, trained) = summarise(single).averages
    assert value(trained, 1) == 1.0 and math.isnan(trained.pass_at_k[1].low)
    assert trained.differences[1].estimate.value == 1.0 and not trained.differences[1].outside_noise


def test_the_average_is_over_what_all_runs_have():
    results = [result(["c"]), result(["c"], benchmark="amc23"), result(["w"], benchmark="math500")]
    assert summarise(results).averaged == ["aime24", "amc23", "math500"]
    results += [result(["c"], step=9), result(["c"], step=9, benchmark="math500")]
    summary = summarise(results)
    assert summary.averaged == ["aime24", "math500"]
    assert value(summary.averages[0], 1) == 0.5
    assert summarise(results[:4]).averages == []
