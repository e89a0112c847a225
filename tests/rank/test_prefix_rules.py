"""``calculator.prefix_rule``: velocity and acceleration as the versions of the paper's release take their prefixes."""

import math

import numpy as np
import pytest
import torch

from tests.rank.reference_loop import mask_of, terms, velocity_and_acceleration
from verl.rank.dynamics import with_whole

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


def test_the_whole_is_one_more_column():
    values, counts = torch.tensor([[1.0, 2.0], [3.0, 9.0], [9.0, 9.0]]), torch.tensor([2, 1, 0])
    longer, more = with_whole(values, counts, torch.tensor([7.0, 8.0, 6.0]), torch.tensor([True, True, False]))
    assert longer.tolist() == [[1, 2, 7], [3, 8, 0], [6, 9, 0]] and more.tolist() == [3, 2, 0]


@pytest.mark.parametrize("rule", RULES[1:])
def test_the_last_term_is_the_rank_as_it_is_stored(make_calculator, rule):
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
def test_the_matrix_of_mean_states_follows_the_same_rule(make_calculator, rule):
    states = random_states(3, 1, 11, 5)[0]
    metrics = make_calculator(prefix_rule=rule).dataset_metrics(states, diff_stride=3)
    actual = [metrics[f"cumulative/Effective Rank {diff}"] for diff in ("diff", "diff 2")]
    expected = velocity_and_acceleration(terms(rule, states.numpy(), 3, None, "end"))
    assert actual == pytest.approx(expected, abs=1e-6)


def test_masked_responses_stay_masked(make_calculator):
    hidden = random_states(4, 2, 11, 1, 5)
    hidden[1, 4] = math.nan
    for rule in RULES:
        calculator = make_calculator(diff_stride=3, prefix_rule=rule, on_nonfinite="mask")
        clean, masked = measured(calculator, hidden, [11, 11])
        assert np.isfinite(clean).all() and np.isnan(masked).all(), rule
