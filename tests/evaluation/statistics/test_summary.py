import math

import pytest

from tests.evaluation.example_results import problem, result
from verl.evaluation.statistics.summary import AVERAGE, summarise


def value(row, k: int) -> float:
    return row.pass_at_k[k].value


def test_figures_of_one_result():
    (row,) = summarise([result(["cwww", "cccn", "wwww"])]).rows
    # per problem pass@1: 1/4, 3/4, 0; pass@2: 1/2, 1, 0
    assert [value(row, k) for k in (1, 2, 4)] == pytest.approx([1 / 3, 1 / 2, 2 / 3])
    # votes of 4: 8 wins; 7 wins (one abstains); 8 wins
    assert [row.maj_at_k[k].value for k in (1, 4)] == pytest.approx([1 / 3, 1 / 3])
    assert (row.num_problems, row.num_missing, row.samples, row.largest_k) == (3, 0, (4, 4), 4)
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
    with pytest.raises(ValueError, match="compare_to='base': must be one of auto, first, step0"):
        summarise(results, "base")


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
