"""Correlations against scipy's on resampled data, and intervals that hold the true value as often as they say."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
import pytest
from scipy.stats import pearsonr, spearmanr

from verl.analysis.correlations import correlate, correlation_table, draw_weights

NO_LENGTH = np.array([1.0, 2.0, 4.0, 3.0, 5.0, 5.0])


def row_of(x: np.ndarray, y: np.ndarray, length: np.ndarray, prompts: Sequence[int], draws: int) -> pd.Series:
    """The row of one pair of columns."""
    frame = pd.DataFrame({"prompt_id": prompts, "x": x, "y": y, "length": length})
    return correlation_table(frame, [("x", "y")], "length", None, draws, seed=0).iloc[0]


def test_by_hand():
    x, y = np.array([1.0, 2.0, 3.0, 4.0]), np.array([1.0, 4.0, 9.0, 16.0])
    found = row_of(x, y, np.array([1.0, -1.0, -1.0, 1.0]), range(4), draws=50)
    # Deviations (-1.5 .. 1.5) and (-6.5, -3.5, 1.5, 8.5): 25 / sqrt(5 * 129).
    assert found["pearson"] == pytest.approx(25 / np.sqrt(645))
    assert found["spearman"] == pytest.approx(1)
    # The length is uncorrelated with x; its ranks tie in pairs.
    yz = 4 / np.sqrt(4 * 129)
    assert found["pearson_partial"] == pytest.approx((25 / np.sqrt(645)) / np.sqrt(1 - yz**2))


def test_a_weight_is_a_repetition():
    x, y = np.array([3.0, 1.0, 2.0, 2.0, 7.0, -1.0]), np.array([2.0, 1.0, 1.0, 5.0, 3.0, 3.0])
    weights = draw_weights([0, 0, 1, 1, 2, 2], draws=30, seed=4)
    assert weights.shape == (31, 6) and (weights[0] == 1).all() and (weights[1:].sum(axis=1) == 6).all()
    assert (weights[:, ::2] == weights[:, 1::2]).all() and weights[1:].max() > 2
    of_values, of_ranks = np.moveaxis(correlate(np.stack([x, y]), weights), 1, 0)[:, :, 0, 1]
    checked = 0
    for row, counts in enumerate(weights.astype(int)):
        sample = np.repeat(x, counts), np.repeat(y, counts)
        if np.unique(sample[0]).size < 2 or np.unique(sample[1]).size < 2:
            continue
        checked += 1
        assert of_values[row] == pytest.approx(pearsonr(*sample).statistic)
        assert of_ranks[row] == pytest.approx(spearmanr(*sample).statistic)
    assert checked > 20


def test_partial_correlations_are_those_of_residuals():
    generator = np.random.default_rng(1)
    length = generator.normal(size=60)
    x, y = 2 * length + generator.normal(size=60), -length + generator.normal(size=60)
    found = row_of(x, y, length, range(60), draws=20)
    design = np.stack([np.ones(60), length], axis=1)
    residuals = [v - design @ np.linalg.lstsq(design, v, rcond=None)[0] for v in (x, y)]
    assert found["pearson"] < -0.4
    assert found["pearson_partial"] == pytest.approx(pearsonr(*residuals).statistic)


def test_intervals_are_over_prompts_and_hold_the_true_value():
    # Every prompt has four equal responses: as responses, intervals would be half as wide and hold too rarely.
    generator = np.random.default_rng(0)
    held = 0
    for _ in range(50):
        x = generator.normal(size=40)
        y = 0.6 * x + 0.8 * generator.normal(size=40)
        four = [np.repeat(v, 4) for v in (x, y, generator.normal(size=40))]
        found = row_of(*four, np.repeat(np.arange(40), 4), draws=100)
        held += found["pearson_low"] <= 0.6 <= found["pearson_high"]
    assert 43 <= held <= 49


def test_undefined_correlations():
    constant = row_of(NO_LENGTH, np.full(6, 0.1), NO_LENGTH, range(6), draws=20)
    assert constant["pearson":].isna().all() and len(constant["pearson":]) == 12
    one_prompt = row_of(NO_LENGTH, NO_LENGTH**2, NO_LENGTH[::-1], [7] * 6, draws=20)
    assert one_prompt["pearson"] > 0.9 and np.isnan(one_prompt["pearson_low"])
    holes = np.array([1.0, np.nan, np.nan, np.nan, np.inf, 2.0])
    assert np.isnan(row_of(holes, NO_LENGTH, NO_LENGTH, range(6), draws=20)["spearman"])


def test_the_table_has_correct_and_wrong_responses_apart():
    frame = pd.DataFrame(
        {
            "prompt_id": [0, 0, 1, 1, 2, 2, 3, 3],
            "a": [1, 5, 2, 4, 3, 2, 4, 1],
            "b": [2.0, 1.0, 4.0, 2.0, 6.0, 4.0, 8.0, 5.0],
            "response_length": [3, 9, 1, 4, 8, 2, 5, 7],
            "correctness": [1.0, 0.0] * 4,
        }
    )
    table = correlation_table(frame, [("a", "b")], "response_length", "correctness", draws=100, seed=0)
    assert table["responses"].tolist() == ["all", "correct", "wrong"] and table["count"].tolist() == [8, 4, 4]
    assert table["pearson"].tolist()[1:] == pytest.approx([1.0, -1.0])
    assert table["spearman_low"][2] == pytest.approx(-1.0)
    assert len(correlation_table(frame, [("a", "b")], "response_length", None, draws=10, seed=0)) == 1
