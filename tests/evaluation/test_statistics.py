"""Bootstrap intervals, statistics of responses, and the rows that they make."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import pytest

from tests.evaluation.example_results import problem, result, with_metrics
from verl.evaluation.reranking import with_scores
from verl.evaluation.results import TaskResult
from verl.evaluation.statistics import AVERAGE, intervals, repetition_rate, resampled, summarise

Interval = tuple[float, float, float]
"""Value, low, high."""


def of_values(*benchmarks: Sequence[float], shares: bool = False, **options: Any) -> Interval:
    """Return the macro average of one figure with its interval."""
    values = [pd.DataFrame({"x": of_problems}, dtype=float) for of_problems in benchmarks]
    drawn = [resampled(of_problems, seed, **options) for seed, of_problems in enumerate(values)]
    return tuple(intervals(drawn, values if shares else ()).values())


def rows_of(*results: TaskResult, **options: object) -> list[pd.Series]:
    """Return the rows of results on benchmarks, without averages."""
    table = summarise(results, **options).table
    return [row for (benchmark, _), row in table.iterrows() if benchmark != AVERAGE]


def test_an_interval_of_many_problems_is_the_normal_one():
    # 400 ones of 1000: standard error sqrt(0.24 / 1000) = 0.01549, so 0.4 -+ 1.96 * 0.01549
    assert of_values([1.0] * 400 + [0.0] * 600) == pytest.approx((0.4, 0.3696, 0.4304), abs=2e-3)


def test_pairing_removes_what_both_runs_share():
    # The second run solves ten problems more of 100; what the others are does not matter.
    hard = np.array([0.0, 1.0] * 50)
    better = hard.copy()
    better[:20] = 1.0
    value, *ends = of_values(better - hard)
    assert value == pytest.approx(0.1)
    # standard error sqrt(0.1 * 0.9 / 100) = 0.03; unpaired it would be sqrt(0.25 / 100 + 0.24 / 100) = 0.07
    assert ends == pytest.approx([0.04, 0.16], abs=0.011)
    assert of_values(hard - hard) == (0.0, 0.0, 0.0)


def test_one_seed_gives_one_interval_for_all_columns():
    values = pd.DataFrame({"x": np.random.default_rng(1).random(50)})
    assert resampled(values, seed=3).equals(resampled(values, seed=3))
    assert not resampled(values, seed=3).equals(resampled(values, seed=4))
    both = resampled(values.assign(y=2 * values["x"]))
    assert both["y"].to_numpy() == pytest.approx(2 * both["x"].to_numpy())


def test_a_macro_average_gives_every_benchmark_the_same_weight():
    # Standard errors 0.5 / sqrt(100) and 0: the average is off by half of the first.
    half = [0.0, 1.0] * 50
    value, *ends = of_values(half, [1.0] * 400)
    assert value == 0.75 and ends == pytest.approx([0.701, 0.799], abs=5e-3)
    # Shares that are the same for all problems: Wilson's interval of 0 of 12, z^2 / (12 + z^2), and of 12 of 12.
    assert of_values([0.0] * 12, shares=True) == (0.0, 0.0, pytest.approx(0.242494))
    assert of_values([1.0] * 12, shares=True) == (1.0, pytest.approx(0.757506), 1.0)
    # In an average the parts' widths add up in squares: 0.2425 / 2 upwards of the one, 0.049 of the other.
    _, *ends = of_values(half, [0.0] * 12, shares=True)
    assert ends == pytest.approx([0.201, 0.25 + math.hypot(0.121247, 0.049)], abs=5e-3)
    for n in range(2, 200, 7):
        _, low, _ = of_values([0.0] * n, shares=True, draws=10)
        _, _, high = of_values([1.0] * n, shares=True, draws=10)
        assert low == 0 and high == 1  # not -1e-17, which tables show as -0.0
    # One problem has no interval.
    value, *ends = of_values([0.25], [0.5, 1.0])
    assert value == 0.5 and all(map(math.isnan, ends))


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
    (row,) = rows_of(found)
    assert [row[f"Effective Rank/{group}"] for group in ("all", "correct", "wrong")] == [7.2, 2.0, 15.0]
    (row,) = rows_of(with_metrics(result(["c"]), {"Curvature": [0.5]}))
    assert row["Curvature/all"] == 0.5 and math.isnan(row["Curvature/wrong"])


def test_a_reward_model_chooses():
    # It prefers the only correct one of the first problem, and a wrong one of the second.
    scores = {(0, 0): 9.0, (0, 1): 0.0, (0, 2): 0.0, (1, 2): 9.0, (1, 0): -9.0, (1, 1): -9.0}
    scored = with_scores(result(["cww", "ccw"]), scores)
    (row,) = rows_of(scored)
    # Of 2 among 3 the best is among the choice in 2 of 3.
    assert [row[f"rm@{k}"] for k in (1, 2, 3)] == pytest.approx([1 / 2, (2 / 3 + 1 / 3) / 2, 1 / 2])
    # sigmoid(9) against twice 1/2; twice sigmoid(-9) against sigmoid(9); votes without weights elect the other ones.
    assert (row["rm_maj@3"], row["maj@3"]) == (0.0, 0.5)
    assert (row["rm@3_low"], row["rm@3_high"]) == (0.0, 1.0)
    # A sample that was not generated is chosen last; averages hold what every benchmark has.
    table = summarise([scored, with_scores(result(["cww"], benchmark="amc23"), {(0, 1): -99.0})]).table
    assert table["rm@3"].tolist()[1:] == [0.0, 0.25]
    assert math.isnan(summarise([scored, result(["cww"], benchmark="amc23")]).table["rm@3"].iloc[2])


def test_figures_of_one_result():
    (row,) = rows_of(result(["cwww", "cccn", "wwww"]))
    # per problem pass@1: 1/4, 3/4, 0; pass@2: 1/2, 1, 0
    assert [row[f"pass@{k}"] for k in (1, 2, 4)] == pytest.approx([1 / 3, 1 / 2, 2 / 3])
    # votes of 4: 8 wins; 7 wins (one abstains); 8 wins
    assert [row[f"maj@{k}"] for k in (1, 4)] == pytest.approx([1 / 3, 1 / 3])
    assert row[["problems", "problems_without_samples", "samples_min", "samples_max"]].tolist() == [3, 0, 4, 4]
    assert (row["mean_tokens"], row["truncation_rate"]) == (10.0, pytest.approx(1 / 12))
    assert row.filter(like="reason_").to_dict() == {"reason_correct": 4, "reason_wrong": 7, "reason_no_answer": 1}
    assert row["baseline"] == "" and math.isnan(row["difference@1"]) and "rm@1" not in row


def test_problems_with_few_samples_or_none():
    summary = summarise([result(["cw", "cwww", ""])])
    (row,) = summary.table.iloc
    assert summary.ks == [1, 2]
    # k=2: of two samples both, of four 1 - C(3,2)/C(4,2) = 1/2
    assert row["pass@2"] == pytest.approx(0.75)
    assert row[["problems", "problems_without_samples", "samples_min", "samples_max"]].tolist() == [2, 1, 2, 4]
    summary = summarise([result(["", ""]), result([], benchmark="empty")])
    without, empty = summary.table.iloc
    assert (without["problems"], without["problems_without_samples"]) == (0, 2) and math.isnan(without["mean_tokens"])
    assert (empty["problems"], empty["problems_without_samples"]) == (0, 0)
    assert summary.averaged == [] and summary.ks == []
    assert summarise([]).table.empty


EASY, HARD = ["cccc"] * 8 + ["wwww"] * 8, ["wwww"] * 16


def test_step_0_of_the_same_run_is_the_baseline():
    results = [result(HARD), result(EASY, step=9), result(HARD, run="verl"), result(EASY, run="verl", step=9)]
    table = summarise(results).table.loc["aime24"]
    assert table["baseline"].to_dict() == {"grpo@0": "", "grpo@9": "grpo@0", "verl@0": "grpo@0", "verl@9": "verl@0"}
    assert table["difference@1"].tolist()[1:] == pytest.approx([0.5, 0, 0.5])
    assert table["difference@1_outside_noise"].tolist()[1:] == [True, False, True]


def test_other_baselines():
    results = [result(HARD, run="other", step=3), result(HARD), result(EASY, step=9)]
    assert summarise(results, "first").table["baseline"].tolist() == ["", "other@3", "other@3"]
    assert summarise(results, "step0").table["baseline"].tolist() == ["", "", "grpo@0"]
    # A benchmark without a result of the first has none.
    results = [result(["c"], "a"), *(result(["w"], "c", benchmark=name) for name in ("aime24", "amc23"))]
    results.append(result(["c"], "b", benchmark="amc23"))
    found = summarise(results).table["baseline"]
    assert found["aime24", "c@0"] == "a@0" and found["amc23", "c@0"] == ""


def test_baselines_have_the_same_temperature():
    places = [(run, step, t) for run in "ab" for t in (0.5, 1.0) for step in (0, 9)]
    results = [result(["cw"], run, step, temperature=t) for run, step, t in places]
    found = summarise(results).table["baseline"]
    assert [run for _, run in found.index[:4]] == ["a@0 T=0.5", "a@9 T=0.5", "a@0 T=1", "a@9 T=1"]
    low, high = "a@0 T=0.5", "a@0 T=1"
    assert found.tolist() == ["", low, low, high, low, "b@0 T=0.5", high, "b@0 T=1"]
    assert summarise(results, "first").table["baseline"].tolist() == ["", low, low, high, low, low, high, high]


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
    _, row = rows_of(result(before), result(after, step=9))
    assert (row["difference@1_low"] > 0) - (row["difference@1_high"] < 0) == direction
    assert row["difference@1_outside_noise"] is outside


def test_differences_are_over_the_problems_that_both_have():
    base = result(["w", "w", problem(2, "c", question="old")])
    new = result([problem(1, "c"), problem(2, "w", question="new"), problem(3, "w")], step=9)
    assert rows_of(base, new)[1]["difference@1"] == 1.0
    assert math.isnan(rows_of(base, result([problem(7, "c")], step=8))[1]["difference@1"])


def test_the_average_gives_every_benchmark_the_same_weight():
    results = [result(["cc"] * 10), result(["ww"] * 2, benchmark="amc23")]
    results += [result(["cc"] * 10, step=9), result(["cwww"] * 2, step=9, benchmark="amc23")]
    base, trained = summarise(results).table.loc[AVERAGE].iloc
    assert (base["problems"], base["pass@1"]) == (12, 0.5)
    assert trained["pass@1"] == pytest.approx(0.625) and math.isnan(trained["pass@4"])
    assert (trained["samples_min"], trained["samples_max"]) == (2, 4)
    assert trained["difference@2"] == pytest.approx(0.25)
    # No problem of the first benchmark changes; the other two do, alike, so the interval has no width.
    assert trained["difference@1_low"] == pytest.approx(0.125)
    assert not trained["difference@1_outside_noise"]
    # Over benchmarks of one problem there is no interval.
    single = [result(["wc"[step]], step=step, benchmark=f"b{i}") for step in (0, 1) for i in range(6)]
    _, trained = summarise(single).table.loc[AVERAGE].iloc
    assert trained["pass@1"] == 1.0 and math.isnan(trained["pass@1_low"])
    assert trained["difference@1"] == 1.0 and not trained["difference@1_outside_noise"]


def test_the_average_is_over_what_all_runs_have():
    results = [result(["c"]), result(["c"], benchmark="amc23"), result(["w"], benchmark="math500")]
    assert summarise(results).averaged == ["aime24", "amc23", "math500"]
    results += [result(["c"], step=9), result(["c"], step=9, benchmark="math500")]
    summary = summarise(results)
    assert summary.averaged == ["aime24", "math500"]
    assert summary.table.loc[AVERAGE]["pass@1"].iloc[0] == 0.5
    assert summarise(results[:4]).averaged == []
