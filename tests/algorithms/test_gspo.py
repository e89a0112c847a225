import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.algorithms.losses import gspo_loss, sequence_mean


def f64(values, **options):
    return torch.tensor(values, dtype=torch.float64, **options)


def test_literal_losses_and_gradients():
    # Log ratios log 4 and 0: mean log 2, s = 2. Then log 0.25 and 0: s = 0.5. One token of ratio 1.25, s = 1.25.
    new = f64([[4.0, 1.0, 1.0], [0.25, 1.0, 1.0], [0.25, 1.0, 1.0], [1.25, 9.0, 9.0]]).log().requires_grad_()
    advantages = f64([[1.0, -3.0, 7.0], [2.0, 2.0, 7.0], [-2.0, -2.0, 7.0], [2.0, 7.0, 7.0]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 0], [1, 1, 0], [1, 0, 0]])
    losses, metrics = gspo_loss(new, torch.zeros_like(advantages), advantages, mask, 0.2, 0.3)
    # clipped: s = 2 to 1.3 where A > 0, s = 0.5 to 0.8 where A < 0
    expected = f64([[-1.3, 6.0, 0.0], [-1.0, -1.0, 0.0], [1.6, 1.6, 0.0], [-2.5, 0.0, 0.0]])
    torch.testing.assert_close(losses, expected)
    losses.sum().backward()
    # -s A for each token by itself where not clipped, whatever the token's own ratio
    gradient = f64([[0.0, 6.0, 0.0], [-1.0, -1.0, 0.0], [0.0, 0.0, 0.0], [-2.5, 0.0, 0.0]])
    torch.testing.assert_close(new.grad, gradient)
    assert metrics["pg_clipfrac"].item() == 3
    assert metrics["num_tokens"].item() == 7
    assert metrics["ppo_kl"].item() == pytest.approx(-math.log(4 * 0.25 * 0.25 * 1.25), rel=1e-12)
    assert not any(value.requires_grad for value in metrics.values())


@given(st.integers(0, 2**31 - 1), st.floats(0.01, 0.5), st.floats(0.01, 0.5))
@settings(max_examples=60, deadline=None)
def test_sequence_mean_is_the_papers_sequence_objective(seed, clip_low, clip_high):
    """One advantage per response: value and gradient of sum over i of min(s_i A_i, clip(s_i) A_i), by autograd."""
    generator = torch.Generator().manual_seed(seed)
    new, old = torch.randn(2, 6, 5, generator=generator, dtype=torch.float64)
    advantages = torch.randn(6, 1, generator=generator, dtype=torch.float64)
    lengths = torch.randint(1, 6, (6, 1), generator=generator)
    mask = torch.arange(5) < lengths

    ours = new.clone().requires_grad_()
    losses, _ = gspo_loss(ours, old, advantages.expand(6, 5), mask, clip_low, clip_high)
    loss = sequence_mean(losses, mask, 6)
    loss.backward()

    reference = new.clone().requires_grad_()
    s = (((reference - old) * mask).sum(1, keepdim=True) / lengths).exp()
    objective = torch.minimum(s * advantages, s.clamp(1 - clip_low, 1 + clip_high) * advantages).mean()
    (-objective).backward()

    torch.testing.assert_close(loss, -objective, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(ours.grad, reference.grad, rtol=1e-10, atol=1e-12)
