"""Histograms of the page of runs."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from verl_pages.distributions import NUM_BINS, histograms, read_values


def test_bins_are_the_same_for_all_runs_and_steps():
    steps = [(1, {"reward": np.array([0.0, 1.0, 1.0])}), (2, {"reward": np.array([1.0])})]
    others = [(5, {"reward": np.array([2.4])})]
    (reward,) = histograms([steps, others, []])
    assert (reward["title"], reward["low"], reward["high"]) == ("Reward", 0.0, 2.4)
    first, second = reward["runs"][0]
    # 24 bins of 0.1: the value 1 is the lower edge of the eleventh.
    assert first == [1, 1, [333, *[0] * 9, 667, *[0] * 13]] and second == [2, 2, [*[0] * 10, 1000, *[0] * 13]]
    assert reward["runs"][1:] == [[[5, 5, [*[0] * 23, 1000]]], []]


def test_long_runs_have_several_steps_per_column():
    rng = np.random.default_rng(0)
    values = {step: rng.normal(size=7) for step in range(1, 501)}
    (advantage,) = histograms([[(step, {"advantage": found}) for step, found in values.items()]])
    (columns,) = advantage["runs"]
    assert len(columns) == 60 and columns[0][0] == 1 and columns[-1][1] == 500
    for first, last, shares in columns:
        among = np.concatenate([values[step] for step in range(first, last + 1)])
        edges = np.linspace(advantage["low"], advantage["high"], NUM_BINS + 1)
        places = np.clip(np.searchsorted(edges, among, side="right") - 1, 0, NUM_BINS - 1)
        expected = [1000 * sum(places == bin) / len(among) for bin in range(NUM_BINS)]
        assert shares == pytest.approx(expected, abs=0.5)


def test_values_are_finite_numbers(tmp_path):
    table = pa.table({"uid": [1, 2, 3, 4], "advantage": [1.0, None, float("inf"), -1e308], "num_tokens": [4, 5, 6, 7]})
    pq.write_table(table, tmp_path / "train.parquet")
    values = read_values(pq.ParquetFile(tmp_path / "train.parquet"))
    assert {name: found.tolist() for name, found in values.items()} == {"num_tokens": [4, 5, 6, 7], "advantage": [1]}


@pytest.mark.parametrize("values", [[3.0, 3.0], [0.0, 5e-324], [1e30, 1e30 - 1e15], [-1e30, 1e30], [0.0, 1e-300]])
def test_any_range_has_bins(values: list[float]):
    (reward,) = histograms([[(1, {"reward": np.array(values)})]])
    assert reward["low"] < reward["high"] and sum(reward["runs"][0][0][2]) == 1000
