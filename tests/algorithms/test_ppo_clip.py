import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.algorithms.losses import ppo_clip_loss


def loss_of(ratios, advantages, mask=None, clip_low=0.2, clip_high=0.3, **options):
    logprobs = torch.tensor([ratios], dtype=torch.float64).log().requires_grad_()
    advantages = torch.tensor([advantages], dtype=torch.float64)
    mask = torch.ones_like(advantages) if mask is None else torch.tensor([mask])
    old = torch.zeros_like(advantages)
    losses, metrics = ppo_clip_loss(logprobs, old, advantages, mask, clip_low, clip_high, **options)
    return logprobs, losses, metrics


def test_literal_losses_and_gradients():
    # Clipping acts where it would make the objective smaller: high ratio and A > 0, low ratio and A < 0.
    logprobs, losses, metrics = loss_of([1.0, 1.5, 1.5, 0.5, 0.5, 1.25], [2.0, 2.0, -2.0, 2.0, -2.0, 2.0])
    expected = torch.tensor([[-2.0, -2.6, 3.0, -1.0, 1.6, -2.5]], dtype=torch.float64)
    torch.testing.assert_close(losses, expected)
    losses.sum().backward()
    # d(-r A)/d log r = -r A; nothing where clipped
    gradient = torch.tensor([[-2.0, 0.0, 3.0, -1.0, 0.0, -2.5]], dtype=torch.float64)
    torch.testing.assert_close(logprobs.grad, gradient)
    assert metrics["pg_clipfrac"].item() == 2
    assert metrics["num_tokens"].item() == 6
    assert metrics["ppo_kl"].item() == pytest.approx(-math.log(1.5 * 1.5 * 0.5 * 0.5 * 1.25), rel=1e-12)
    assert not any(value.requires_grad for value in metrics.values())


def test_literal_dual_clip():
    # c = 3 bounds the loss at 3 |A| where A < 0 and r > 3; A > 0 never meets the bound.
    ratios, advantages = [4.0, 4.0, 2.5, 2.9, 0.5, 5.0], [-2.0, 2.0, -2.0, -1.0, -2.0, -0.5]
    logprobs, losses, metrics = loss_of(ratios, advantages, clip_ratio_c=3.0)
    expected = torch.tensor([[6.0, -2.6, 5.0, 2.9, 1.6, 1.5]], dtype=torch.float64)
    torch.testing.assert_close(losses, expected)
    losses.sum().backward()
    gradient = torch.tensor([[0.0, 0.0, 5.0, 2.9, 0.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(logprobs.grad, gradient)
    assert metrics["pg_clipfrac_lower"].item() == 2
    assert metrics["pg_clipfrac"].item() == 2
    assert metrics["num_tokens"].item() == 6
    assert "pg_clipfrac_lower" not in loss_of(ratios, advantages)[2]


def test_dual_clip_bounds_what_a_huge_ratio_can_do_and_ignores_padding():
    logprobs = torch.tensor([[0.0, math.nan, math.inf]], requires_grad=True)
    old = torch.tensor([[-200.0, 0.0, 0.0]])
    advantages = torch.tensor([[-2.0, -math.inf, math.nan]])
    mask = torch.tensor([[1, 0, 0]])
    losses, metrics = ppo_clip_loss(logprobs, old, advantages, mask, 0.2, 0.2, clip_ratio_c=3.0)
    losses.sum().backward()
    assert losses.tolist() == [[6.0, 0.0, 0.0]]
    assert logprobs.grad.tolist() == [[0.0, 0.0, 0.0]]
    assert metrics["pg_clipfrac_lower"].item() == 1


@pytest.mark.parametrize("c", [1.0, -3.0, math.nan, math.inf])
def test_dual_clip_ratio_is_checked(c):
    with pytest.raises(ValueError, match="clip_ratio_c"):
        loss_of([1.0], [1.0], clip_ratio_c=c)


@given(st.integers(0, 2**31 - 1), st.floats(0, 1), st.floats(0, 1), st.none() | st.floats(1.01, 4))
@settings(max_examples=60, deadline=None)
def test_agrees_with_the_papers_objective_token_by_token(seed, clip_low, clip_high, c):
    generator = torch.Generator().manual_seed(seed)
    new, old, advantages = torch.randn(3, 4, 5, generator=generator, dtype=torch.float64)
    logprobs = new.clone().requires_grad_()
    losses, _ = ppo_clip_loss(logprobs, old, advantages, torch.ones(4, 5), clip_low, clip_high, clip_ratio_c=c)
    losses.sum().backward()
    for i in range(4):
        for j in range(5):
            a, r = float(advantages[i, j]), math.exp(float(new[i, j] - old[i, j]))
            objective = min(r * a, min(max(r, 1 - clip_low), 1 + clip_high) * a)
            open_ended = objective == r * a
            if c is not None and a < 0 and objective < c * a:
                objective, open_ended = c * a, False
            assert losses[i, j].item() == pytest.approx(-objective, rel=1e-9)
            # d(r a)/d log r = r a, and 0 on every flat piece
            assert logprobs.grad[i, j].item() == pytest.approx(-r * a if open_ended else 0.0, rel=1e-9)
