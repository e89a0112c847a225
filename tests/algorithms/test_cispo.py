import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.algorithms.losses import cispo_loss


def test_literal_losses_and_gradients():
    # ratios 2, 2, 0.5, 0.5, 1.25; policy at probability 0.5 throughout
    half = math.log(0.5)
    logprobs = torch.full((1, 5), half, dtype=torch.float64, requires_grad=True)
    old = half - torch.tensor([[2.0, 2.0, 0.5, 0.5, 1.25]], dtype=torch.float64).log()
    advantages = torch.tensor([[1.0, -1.0, 2.0, -2.0, 3.0]], dtype=torch.float64)
    losses, metrics = cispo_loss(logprobs, old, advantages, torch.ones(1, 5), 0.2, 0.3)
    # weights 1.3, 1.3, 0.8, 0.8, 1.25 times the advantage: clipped whatever its sign, and the gradient stays
    signal = torch.tensor([[1.3, -1.3, 1.6, -1.6, 3.75]], dtype=torch.float64)
    torch.testing.assert_close(losses, -signal * half)
    losses.sum().backward()
    torch.testing.assert_close(logprobs.grad, -signal)
    assert metrics["pg_clipfrac"].item() == 4
    assert metrics["num_tokens"].item() == 5
    assert metrics["ppo_kl"].item() == pytest.approx(-math.log(2 * 2 * 0.5 * 0.5 * 1.25), rel=1e-12)
    assert not any(value.requires_grad for value in metrics.values())


def test_clip_low_of_one_leaves_the_lower_side_open():
    logprobs = torch.tensor([[-3.0, -9.0]], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([[-1.0, -1.0]], dtype=torch.float64)
    losses, metrics = cispo_loss(logprobs, old, torch.ones(1, 2), torch.ones(1, 2), 1.0, 0.3)
    losses.sum().backward()
    expected = torch.tensor([[-math.exp(-2), -math.exp(-8)]], dtype=torch.float64)
    torch.testing.assert_close(logprobs.grad, expected)
    assert metrics["pg_clipfrac"].item() == 0


@given(st.integers(0, 2**31 - 1), st.floats(0, 1), st.floats(0, 2))
@settings(max_examples=60, deadline=None)
def test_gradient_is_the_policy_gradient_with_a_bounded_weight(seed, clip_low, clip_high):
    generator = torch.Generator().manual_seed(seed)
    new, old, advantages = torch.randn(3, 4, 5, generator=generator, dtype=torch.float64)
    mask = torch.rand(4, 5, generator=generator) < 0.7

    ours = new.clone().requires_grad_()
    losses, metrics = cispo_loss(ours, old, advantages, mask, clip_low, clip_high)
    losses.sum().backward()

    # importance-weighted policy gradient -r A without any clip, by autograd
    reference = new.clone().requires_grad_()
    (-(reference - old).exp() * advantages * mask).sum().backward()

    ratio = (new - old).exp()
    low, high = ratio < 1 - clip_low, ratio > 1 + clip_high
    expected = torch.where(low, reference.grad / ratio * (1 - clip_low), reference.grad)
    expected = torch.where(high, reference.grad / ratio * (1 + clip_high), expected)
    torch.testing.assert_close(ours.grad, expected, rtol=1e-9, atol=1e-12)
    assert metrics["pg_clipfrac"].item() == int((mask & (low | high)).sum())
