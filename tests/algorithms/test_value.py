import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.algorithms.losses import value_loss


def f64(values, **options):
    return torch.tensor(values, dtype=torch.float64, **options)


def test_literal_losses_and_gradients():
    # clip range 0.5 around 1, 1, 1, 1, 0. Within; beyond, towards the return; beyond, away from it; beyond and past
    # the return, still nearer than the bound; at the return.
    values = f64([[1.25, 2.0, 2.0, 2.0, 0.25]], requires_grad=True)
    old = f64([[1.0, 1.0, 1.0, 1.0, 0.0]])
    returns = f64([[2.25, 3.0, 0.0, 1.875, 0.25]])
    losses, metrics = value_loss(values, old, returns, torch.ones(1, 5), 0.5)
    # squares of 1; of 1.5 (clipped) over 1; of 2 over 1.5 (clipped); of 0.375 (clipped) over 0.125; of 0
    torch.testing.assert_close(losses, f64([[0.5, 1.125, 2.0, 0.0703125, 0.0]]), rtol=1e-12, atol=0)
    losses.sum().backward()
    torch.testing.assert_close(values.grad, f64([[-1.0, 0.0, 2.0, 0.0, 0.0]]), rtol=1e-12, atol=0)
    assert metrics["vf_clipfrac"].item() == 2
    assert metrics["num_tokens"].item() == 5
    assert not any(value.requires_grad for value in metrics.values())


def test_padding_never_matters():
    nan, inf = math.nan, math.inf
    values = torch.tensor([[1.0, nan, inf], [nan, -inf, 0.0]], requires_grad=True)
    old = torch.tensor([[1.0, 0.0, -inf], [nan, 1.0, inf]])
    returns = torch.tensor([[3.0, nan, 1.0], [inf, nan, 0.0]])
    losses, metrics = value_loss(values, old, returns, torch.tensor([[1, 0, 0], [0, 0, 0]]), 0.5)
    losses.sum().backward()
    assert losses.tolist() == [[2.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
    assert values.grad.tolist() == [[-2.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
    assert {name: value.item() for name, value in metrics.items()} == {
        "vf_clipfrac": 0.0,
        "num_tokens": 1.0,
    }


@pytest.mark.parametrize("clip_range", [0.0, -0.5, math.nan])
def test_clip_range_is_checked(clip_range):
    ones = torch.ones(1, 1)
    with pytest.raises(ValueError, match="clip_range"):
        value_loss(ones, ones, ones, ones, clip_range)


@given(st.integers(0, 2**31 - 1), st.floats(0.05, 2))
@settings(max_examples=60, deadline=None)
def test_gradient_agrees_with_finite_differences(seed, clip_range):
    generator = torch.Generator().manual_seed(seed)
    start, old, returns = torch.randn(3, 4, 5, generator=generator, dtype=torch.float64)
    mask = torch.rand(4, 5, generator=generator) < 0.7

    def losses_at(values):
        return value_loss(values, old, returns, mask, clip_range)[0]

    values = start.clone().requires_grad_()
    losses_at(values).sum().backward()
    step = 1e-6
    slope = (losses_at(start + step) - losses_at(start - step)) / (2 * step)
    # Not at the kinks: where the clip sets in, and where the two squares cross.
    clipped = old + (start - old).clamp(-clip_range, clip_range)
    crossing = ((start - returns).abs() - (clipped - returns).abs()).abs() < 1e-4
    kinks = ((start - old).abs() - clip_range).abs() < 1e-4
    smooth = ~kinks & (~crossing | ((start - old).abs() < clip_range))
    torch.testing.assert_close(values.grad[smooth], slope[smooth], rtol=1e-6, atol=1e-7)


@given(st.integers(0, 2**31 - 1))
@settings(max_examples=40, deadline=None)
def test_never_below_the_plain_loss(seed):
    generator = torch.Generator().manual_seed(seed)
    values, old, returns = torch.randn(3, 6, 5, generator=generator)
    losses, _ = value_loss(values, old, returns, torch.ones(6, 5), 0.5)
    assert (losses >= 0.5 * (values - returns).square()).all()


@given(st.integers(0, 2**31 - 1))
@settings(max_examples=30, deadline=None)
def test_within_the_range_nothing_counts_as_clipped(seed):
    # in float32, old + (values - old) would differ from values by a rounding
    generator = torch.Generator().manual_seed(seed)
    values, old, returns = torch.randn(3, 4, 5, generator=generator)
    for clip_range in (20.0, math.inf):
        losses, metrics = value_loss(values, old, returns, torch.ones(4, 5), clip_range)
        assert metrics["vf_clipfrac"].item() == 0
        assert torch.equal(losses, 0.5 * (values - returns).square())
