import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.rank.shaping import (
    auxiliary_signal,
    controller_weights,
    exploration_beta,
    last_token_mask,
    relative_deviation,
    shaped_advantages,
)


def f64(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_relative_deviation():
    metric = f64(3.0, 1.0, 100.0, -100.0, math.nan, math.inf, 2.0)
    expected = f64(0.5, -0.5, 5.0, -5.0, 0.0, 0.0, 0.0)
    torch.testing.assert_close(relative_deviation(metric, 2.0), expected, rtol=1e-8, atol=0)
    # a negative baseline divides by its size: above it is positive
    torch.testing.assert_close(relative_deviation(f64(-1.0, -3.0), -2.0), f64(0.5, -0.5), rtol=1e-8, atol=0)
    # a zero baseline: any real difference saturates
    assert relative_deviation(f64(0.01, -0.01, 0.0), 0.0).tolist() == [5.0, -5.0, 0.0]


def test_beta_of_each_hypothesis():
    deviation = f64(0.0, math.log(3) / 2, -math.log(3) / 2)
    torch.testing.assert_close(exploration_beta(deviation, "PlanB", gain=2.0), f64(0.5, 0.75, 0.25))
    assert exploration_beta(deviation, "FixTwo", gain=2.0).tolist() == [0.5, 0.5, 0.5]
    with pytest.raises(ValueError, match="hypothesis_type='PlanC'"):
        exploration_beta(deviation, "PlanC", gain=2.0)


def test_weights_of_each_hypothesis():
    beta, explore, exploit = f64(1.0, 0.25, 0.0), f64(1.0, 0.0), f64(0.2, 0.8)
    expected = torch.stack([f64(1.0, 0.0), f64(0.4, 0.6), f64(0.2, 0.8)])
    for name in ("PlanB", "FixTwo"):
        torch.testing.assert_close(controller_weights(beta, explore, exploit, name), expected)
    expected = torch.stack([f64(1.2, 0.8)] * 3)
    torch.testing.assert_close(controller_weights(beta, explore, exploit, "FixOne"), expected)


def test_auxiliary_signal():
    deviations = torch.stack([f64(math.atanh(0.5), math.atanh(-0.25)), f64(0.0, 0.0)])
    weights = torch.stack([f64(1.0, 2.0), f64(1.0, 2.0)])
    torch.testing.assert_close(auxiliary_signal(deviations, weights, scale=3.0), f64(0.0, 0.0), atol=1e-12, rtol=0)
    torch.testing.assert_close(auxiliary_signal(deviations, weights.flip(1), scale=3.0), f64(2.25, 0.0))


def test_last_token_mask():
    mask = torch.tensor([[1, 1, 0], [1, 0, 1], [0, 0, 0], [1, 1, 1]])
    assert last_token_mask(mask).int().tolist() == [[0, 1, 0], [0, 0, 1], [0, 0, 0], [0, 0, 1]]


def test_literal_shaped_advantages():
    advantages = torch.tensor([[2.0, 2.0, 0.0], [-2.0, -2.0, -2.0], [2.0, 2.0, 2.0], [0.0, 0.0, 0.0]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 1, 1], [1, 1, 1]])
    phi = f64(0.25, 3.0, -3.0, 1.0)
    expected = [[2.25, 2.25, 0.0], [-1.5, -1.5, -1.5], [2.0, 2.0, 2.0], [0.0, 0.0, 0.0]]
    assert shaped_advantages(advantages, mask, phi, kappa=4.0, placement="all_tokens").tolist() == expected
    expected = [[2.0, 2.25, 0.0], [-2.0, -2.0, -1.5], [2.0, 2.0, 2.0], [0.0, 0.0, 0.0]]
    assert shaped_advantages(advantages, mask, phi, kappa=4.0, placement="last_token").tolist() == expected


@pytest.mark.parametrize(
    ("kappa", "placement", "message"), [(0.5, "all_tokens", "kappa=0.5"), (2.0, "first", "'first'")]
)
def test_shaping_arguments_are_checked(kappa, placement, message):
    with pytest.raises(ValueError, match=message):
        shaped_advantages(torch.ones(1, 1), torch.ones(1, 1), torch.ones(1), kappa, placement)


@given(
    st.lists(st.tuples(st.floats(-10, 10, width=32), st.floats(-10, 10, width=32)), min_size=1, max_size=8),
    st.floats(1, 10),
    st.sampled_from(["all_tokens", "last_token"]),
)
@settings(max_examples=60, deadline=None)
def test_bonus_is_bounded_and_keeps_the_sign(rows, kappa, placement):
    advantages = torch.tensor([[a, a] for a, _ in rows])
    phi = torch.tensor([p for _, p in rows])
    shaped = shaped_advantages(advantages, torch.ones_like(advantages), phi, kappa, placement)
    bonus = shaped.double() - advantages.double()
    assert (bonus >= 0).all()
    # the sum is rounded to float32, whose steps are 2^-24 of the value, or 1e-45 near zero
    assert (bonus <= advantages.double().abs() * (1 / kappa + 1e-6) + 1e-44).all()
    assert (shaped * advantages.sign() >= 0).all()
    assert (bonus[phi <= 0] == 0).all()
    assert (bonus[(phi > 0.01) & (advantages[:, 0].abs() > 0.01), -1] > 0).all()
