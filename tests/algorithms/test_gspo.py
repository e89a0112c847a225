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


def test_padding_and_empty_responses_never_matter():
    nan, inf = math.nan, math.inf
    logprobs = torch.tensor([[-1.0, nan, -inf], [nan, inf, -inf]], requires_grad=True)
    old = torch.tensor([[-1.5, 0.0, inf], [0.0, nan, 0.0]])
    advantages = torch.tensor([[-1.0, nan, inf], [nan, -inf, 1.0]])
    mask = torch.tensor([[True, False, False], [False, False, False]])
    losses, metrics = gspo_loss(logprobs, old, advantages, mask, 0.2, 0.2)
    losses.sum().backward()
    s = math.exp(0.5)
    torch.testing.assert_close(losses.detach(), torch.tensor([[s, 0.0, 0.0], [0.0, 0.0, 0.0]]))
    torch.testing.assert_close(logprobs.grad, torch.tensor([[s, 0.0, 0.0], [0.0, 0.0, 0.0]]))
    assert metrics["ppo_kl"].item() == pytest.approx(-0.5)
    assert (metrics["pg_clipfrac"].item(), metrics["num_tokens"].item()) == (0, 1)


def test_huge_log_ratio_stays_finite():
    logprobs = torch.zeros(1, 2, requires_grad=True)
    losses, _ = gspo_loss(logprobs, torch.full((1, 2), -200.0), -torch.ones(1, 2), torch.ones(1, 2), 0.2, 0.2)
    losses.sum().backward()
    torch.testing.assert_close(losses.detach(), torch.full((1, 2), math.exp(20.0)))
    assert logprobs.grad.tolist() == [[0.0, 0.0]]


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


@given(st.integers(0, 2**31 - 1))
@settings(max_examples=30, deadline=None)
def test_metrics_add_over_micro_batches_and_padding_width_does_not_matter(seed):
    generator = torch.Generator().manual_seed(seed)
    new, old, advantages = torch.randn(3, 6, 5, generator=generator, dtype=torch.float64)
    mask = torch.arange(5) < torch.randint(0, 4, (6, 1), generator=generator)
    losses, whole = gspo_loss(new, old, advantages, mask, 0.2, 0.3)
    parts = [gspo_loss(t[0], t[1], t[2], t[3], 0.2, 0.3) for t in zip(new, old, advantages, mask, strict=True)]
    torch.testing.assert_close(torch.stack([part[0] for part in parts]), losses)
    for name, value in whole.items():
        torch.testing.assert_close(sum(part[1][name] for part in parts), value)
    narrow, _ = gspo_loss(new[:, :3], old[:, :3], advantages[:, :3], mask[:, :3], 0.2, 0.3)
    torch.testing.assert_close(narrow, losses[:, :3])


@pytest.mark.parametrize(("low", "high"), [(-0.1, 0.2), (1.1, 0.2), (0.2, -0.1)])
def test_clip_ranges_are_checked(low, high):
    ones = torch.ones(1, 1)
    with pytest.raises(ValueError, match="clip_"):
        gspo_loss(ones, ones, ones, ones, low, high)
