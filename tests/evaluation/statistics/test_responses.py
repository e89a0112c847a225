import math

import pytest

from tests.evaluation.example_results import result, with_metrics
from verl.evaluation.statistics.responses import metric_spreads, repetition_rate


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
