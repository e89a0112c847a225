"""Prefixes, velocity and acceleration, by hand and by the rules of ``calculator.prefix_rule``, and curvature."""

import math

import numpy as np
import pytest
import torch

from tests.kit import f64
from tests.rank.reference_loop import mask_of, terms, velocity_and_acceleration
from verl.config.calculator import BASE_METRICS
from verl.rank.dynamics import acceleration, base_metrics, curvature, prefix_counts, prefix_rows, velocity
from verl.spectral import SpectralOptions


@pytest.mark.parametrize(
    ("lengths", "stride", "extra", "counts", "rows"),
    [
        # j * 8 + 1 rows, while there are as many; and j * 8 rows.
        ([0, 1, 8, 9, 17, 24], 8, 1, [0, 0, 0, 1, 2, 2], [[0, 0], [0, 0], [0, 0], [9, 0], [9, 17], [9, 17]]),
        ([0, 7, 8, 9, 15, 16], 8, 0, [0, 0, 1, 1, 1, 2], [[0, 0], [0, 0], [8, 0], [8, 0], [8, 0], [8, 16]]),
        ([4], 1, 1, [3], [[2, 3, 4]]),
        ([3, 0], 8, 1, [0, 0], [[], []]),
    ],
)
def test_prefixes_run_while_there_are_rows(lengths, stride, extra, counts, rows):
    assert prefix_counts(torch.tensor(lengths), stride, extra).tolist() == counts
    assert prefix_rows(torch.tensor(lengths), stride, extra).tolist() == rows


def test_literal_velocity_and_acceleration():
    # m = 1, 3, 5, 2: running means 1, 2, 3; deltas 2, 3, -1; velocity 4/3; steps 1, -4, mean -3/2
    values = f64(1.0, 3.0, 5.0, 2.0).repeat(5, 1)
    counts = torch.tensor([4, 3, 2, 1, 0])
    torch.testing.assert_close(velocity(values, counts), f64(4 / 3, 2.5, 2.0, 0.0, 0.0))
    torch.testing.assert_close(acceleration(values, counts), f64(-1.5, 1.0, 0.0, 0.0, 0.0))
    # Absent prefixes do not matter, and too few give 0.
    absent = torch.arange(4) >= counts[:, None]
    assert torch.equal(velocity(values.masked_fill(absent, math.nan), counts), velocity(values, counts))
    assert torch.equal(acceleration(values.masked_fill(absent, math.nan), counts), acceleration(values, counts))
    for columns in (0, 1, 2):
        values, counts = torch.full((2, columns), 7.0, dtype=torch.float64), torch.full((2,), columns)
        assert velocity(values, counts).tolist() == acceleration(values, counts).tolist() == [0.0, 0.0]


def test_literal_curvature():
    # Steps right, up, up, left, nothing, left: angles pi/2, 0, pi/2 and two undefined ones.
    path = torch.tensor([[[0, 0], [1, 0], [1, 1], [1, 3], [0, 3], [0, 3], [-1, 3]]], dtype=torch.float32)
    rows = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7]])
    expected = f64(0, 0, 0, math.pi / 2, math.pi / 4, math.pi / 3, math.pi / 3, math.pi / 3)[None]
    torch.testing.assert_close(curvature(path, torch.tensor([7]), rows), expected)
    # A reversal and a slight turn.
    angle = 1e-6
    back = f64(0, 0, 1, 0, 0, 0).reshape(1, 3, 2)
    slight = f64(0, 0, 1, 0, 1 + math.cos(angle), math.sin(angle)).reshape(1, 3, 2)
    result = curvature(torch.cat([back, slight]), torch.tensor([3, 3]), torch.tensor([[3], [3]]))
    assert float(result[0]) == pytest.approx(math.pi, rel=1e-12)
    assert float(result[1]) == pytest.approx(angle, rel=1e-9)


def test_base_metrics_of_square_corners():
    corners = torch.tensor([[[1.0, 1.0], [1.0, 3.0], [3.0, 3.0], [3.0, 1.0]]])
    metrics = base_metrics(corners, torch.tensor([4]), torch.tensor([[4, 1]]), BASE_METRICS[::-1], SpectralOptions())
    expected = {
        "Log Effective Rank": f64(math.log(2), 0.0),
        "Curvature": f64(math.pi / 2, 0.0),
        "Traditional Rank": f64(2.0, 0.0),
        "Effective Rank": f64(2.0, 1.0),
        "Response Entropy 1": f64(math.log(2), 0.0),
    }
    assert list(metrics) == list(expected)
    for name, values in expected.items():
        torch.testing.assert_close(metrics[name], values[None])


RULES = ["after_stride", "after_stride_and_whole", "at_stride_and_whole"]


def random_states(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).cumsum(1)


def measured(calculator, hidden, lengths, name="Effective Rank"):
    by_name = calculator(hidden, mask_of(lengths, hidden.shape[1]))["1"]
    return torch.stack([by_name[f"{name} diff"], by_name[f"{name} diff 2"]], dim=1).numpy()


@pytest.mark.parametrize("method", ["optimized", "original"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("stride", "most", "end"),
    [*((4, most, end) for most, end in [(None, "end"), (12, "start"), (12, "end"), (10, "start"), (1, "start")])]
    + [(1, None, "end"), (2, None, "end")],
)
def test_every_length_follows_its_rule(make_calculator, rule, stride, most, end, method):
    """Lengths 0 to 26: every border of stride, two strides and ``max_seq_len``."""
    lengths = list(range(27))
    hidden = random_states(0, 27, 28, 1, 5)
    options = {"prefix_rule": rule, "max_seq_len": most, "max_seq_len_from": end, "diff_calculator_method": method}
    actual = measured(make_calculator(diff_stride=stride, **options), hidden, lengths)
    rows = [hidden[i, :length, 0].numpy() for i, length in enumerate(lengths)]
    expected = [[0.0, 0.0]] + [velocity_and_acceleration(terms(rule, r, stride, most, end)) for r in rows[1:]]
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-6)


PATH = [[0, 0], [2, 0], [2, 1], [0, 1], [3, 3], [5, 4], [6, 8], [1, 9]]
"""Hidden states of eight tokens; of a response of length T the first T."""

LITERALS = {
    # Effective ranks of the first 2 to 8 rows: 1.000000, 1.821121, 1.889882, 1.883912, 1.712933, 1.628502, 1.881295.
    ("after_stride", 5): [0.062792, 0.000000],
    ("after_stride", 8): [-0.080611, -0.286806],
    ("after_stride_and_whole", 5): [0.047094, -0.031396],
    ("after_stride_and_whole", 8): [-0.019257, 0.020329],
    ("at_stride_and_whole", 5): [0.889882, 0.000000],
    ("at_stride_and_whole", 8): [0.501632, -0.271429],
    ("at_stride_and_whole", 7): [0.578937, -0.621890],
}


@pytest.mark.parametrize(("rule", "length"), LITERALS)
def test_literal_velocity_and_acceleration_of_a_short_path(make_calculator, rule, length):
    hidden = torch.tensor(PATH, dtype=torch.float64)[None, :, None]
    calculator = make_calculator(diff_stride=2, prefix_rule=rule)
    (actual,) = measured(calculator, hidden, [length])
    assert actual.tolist() == pytest.approx(LITERALS[rule, length], abs=2e-6)


@pytest.mark.parametrize("rule", RULES[1:])
def test_last_term_is_the_rank_as_it_is_stored(make_calculator, rule):
    hidden, rows = random_states(2, 1, 11, 1, 6), 11
    calculator = make_calculator(diff_stride=3, prefix_rule=rule, metrics_dtype="bfloat16")
    (actual,) = measured(calculator, hidden, [rows])

    def bfloat16(value):
        return float(torch.tensor(value).bfloat16())

    rounded, exact = (
        velocity_and_acceleration(terms(rule, hidden[0, :, 0].numpy(), 3, None, "end", stored))
        for stored in (bfloat16, float)
    )
    assert actual.tolist() == pytest.approx(rounded, abs=1e-6)
    assert actual.tolist() != pytest.approx(exact, abs=1e-4)


@pytest.mark.parametrize("rule", RULES)
def test_matrix_of_mean_states_follows_the_same_rule(make_calculator, rule):
    states = random_states(3, 1, 11, 5)[0]
    metrics = make_calculator(prefix_rule=rule).dataset_metrics(states, diff_stride=3)
    actual = [metrics[f"cumulative/Effective Rank {diff}"] for diff in ("diff", "diff 2")]
    expected = velocity_and_acceleration(terms(rule, states.numpy(), 3, None, "end"))
    assert actual == pytest.approx(expected, abs=1e-6)
