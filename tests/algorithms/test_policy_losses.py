"""Policy losses and their gradients against numbers worked out by hand, and against the papers' objectives."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.algorithms.losses import POLICY_LOSSES, cispo_loss, gmpo_loss, gspo_loss, ppo_clip_loss, sequence_mean

NAN = math.nan
seeds = st.integers(0, 2**31 - 1)
UP, DOWN = (1 / (1 + math.exp(-x)) for x in (1.0, -1.0))
GMPO = {
    # Log-ratios 0.9, -0.9, 0.1; from above only the first passes 0.4, from below only the second -0.4. The gradient
    # of a token that is not clipped is -A s / 3 times that of the sum over the three tokens.
    2.0: -2 * math.exp((0.4 - 0.9 + 0.1) / 3),
    -1.0: math.exp((0.9 - 0.4 + 0.1) / 3),
}
GMPO_RATIOS = [[math.exp(0.9), math.exp(-0.9), math.exp(0.1), NAN]]

LITERALS = {
    # Clipping acts where it would make the objective smaller: high ratio and A > 0, low ratio and A < 0. The gradient
    # of -r A by log r is -r A, and 0 where clipped.
    "ppo_clip": (
        {"clip_low": 0.2, "clip_high": 0.3},
        [[1.0, 1.5, 1.5, 0.5, 0.5, 1.25]],
        [[2.0, 2.0, -2.0, 2.0, -2.0, 2.0]],
        [[-2.0, -2.6, 3.0, -1.0, 1.6, -2.5]],
        [[-2.0, 0.0, 3.0, -1.0, 0.0, -2.5]],
        {"pg_clipfrac": 2},
    ),
    # c = 3 bounds the loss at 3 |A| where A < 0 and r > 3; A > 0 never meets the bound.
    "ppo_clip, dual": (
        {"clip_low": 0.2, "clip_high": 0.3, "clip_ratio_c": 3.0},
        [[4.0, 4.0, 2.5, 2.9, 0.5, 5.0]],
        [[-2.0, 2.0, -2.0, -1.0, -2.0, -0.5]],
        [[6.0, -2.6, 5.0, 2.9, 1.6, 1.5]],
        [[0.0, 0.0, 5.0, 2.9, 0.0, 0.0]],
        {"pg_clipfrac": 2, "pg_clipfrac_lower": 2},
    ),
    # Log ratios log 4 and 0: mean log 2, s = 2. Then log 0.25 and 0: s = 0.5. One token of ratio 1.25, s = 1.25.
    # Clipped: s = 2 to 1.3 where A > 0, s = 0.5 to 0.8 where A < 0. The gradient is -s A for each token by itself,
    # whatever the token's own ratio.
    "gspo": (
        {"clip_low": 0.2, "clip_high": 0.3},
        [[4.0, 1.0, NAN], [0.25, 1.0, NAN], [0.25, 1.0, NAN], [1.25, NAN, NAN]],
        [[1.0, -3.0, 7.0], [2.0, 2.0, 7.0], [-2.0, -2.0, 7.0], [2.0, 7.0, 7.0]],
        [[-1.3, 6.0, 0.0], [-1.0, -1.0, 0.0], [1.6, 1.6, 0.0], [-2.5, 0.0, 0.0]],
        [[0.0, 6.0, 0.0], [-1.0, -1.0, 0.0], [0.0, 0.0, 0.0], [-2.5, 0.0, 0.0]],
        {"pg_clipfrac": 3},
    ),
    # Weights 1.3, 1.3, 0.8, 0.8, 1.25 times the advantage: clipped whatever its sign, and the gradient stays. The
    # policy's log-probability is that of 1/2, as in all of these.
    "cispo": (
        {"clip_low": 0.2, "clip_high": 0.3},
        [[2.0, 2.0, 0.5, 0.5, 1.25]],
        [[1.0, -1.0, 2.0, -2.0, 3.0]],
        [[math.log(2) * signal for signal in (1.3, -1.3, 1.6, -1.6, 3.75)]],
        [[-1.3, 1.3, -1.6, 1.6, -3.75]],
        {"pg_clipfrac": 4},
    ),
    # A lower range of 1 leaves that side open.
    "cispo, open below": (
        {"clip_low": 1.0, "clip_high": 0.3},
        [[math.exp(-2), math.exp(-8)]],
        [[1.0, 1.0]],
        [[math.log(2) * math.exp(-2), math.log(2) * math.exp(-8)]],
        [[-math.exp(-2), -math.exp(-8)]],
        {"pg_clipfrac": 0},
    ),
    "gmpo, good": (
        {"clip_low": 0.4, "clip_high": 0.4},
        GMPO_RATIOS,
        [[2.0] * 4],
        [[GMPO[2.0]] * 3 + [0.0]],
        [[0.0, GMPO[2.0], GMPO[2.0], 0.0]],
        {"pg_clipfrac": 1},
    ),
    "gmpo, bad": (
        {"clip_low": 0.4, "clip_high": 0.4},
        GMPO_RATIOS,
        [[-1.0] * 4],
        [[GMPO[-1.0]] * 3 + [0.0]],
        [[GMPO[-1.0], 0.0, GMPO[-1.0], 0.0]],
        {"pg_clipfrac": 1},
    ),
    "gmpo, neither": (
        {"clip_low": 0.4, "clip_high": 0.4},
        GMPO_RATIOS,
        [[0.0] * 4],
        [[0.0] * 4],
        [[0.0] * 4],
        {"pg_clipfrac": 0},
    ),
    # The advantage is the response's mean.
    "gmpo, unequal": (
        {"clip_low": 0.4, "clip_high": 0.4},
        [[1.0, 1.0]],
        [[1.0, 2.0]],
        [[-1.5, -1.5]],
        [[-1.5, -1.5]],
        {"pg_clipfrac": 0},
    ),
    "gpg": ({}, [[2.0, 1.0]], [[3.0, -1.0]], [[3 * math.log(2), -math.log(2)]], [[-3.0, 1.0]], {}),
    # Temperatures 1 for the positive advantage and 2 for the others.
    "sapo": (
        {"tau_pos": 1.0, "tau_neg": 2.0},
        [[2.0, 0.5, 1.0]],
        [[3.0, -1.0, 0.0]],
        [[-12 * UP, 2 * DOWN, 0.0]],
        [[-12 * UP * (1 - UP) * 2, 4 * DOWN * (1 - DOWN) * 0.5, 0.0]],
        {},
    ),
}
"""Loss and case -> options, ratios (NaN on padding), advantages; losses, gradients of their sum, counts of tokens."""


@pytest.mark.parametrize("case", LITERALS)
def test_literal_losses_and_gradients(case):
    options, ratios, advantages, expected, gradient, counts = LITERALS[case]
    log_ratios, advantages = torch.tensor(ratios, dtype=torch.float64).log(), torch.tensor(advantages).double()
    mask, logprobs = ~log_ratios.isnan(), torch.full_like(log_ratios, math.log(0.5)).requires_grad_()
    losses, metrics = POLICY_LOSSES[case.split(",")[0]](
        logprobs, logprobs.detach() - log_ratios, advantages, mask, **options
    )
    losses.sum().backward()
    torch.testing.assert_close(losses.detach(), torch.tensor(expected, dtype=torch.float64))
    torch.testing.assert_close(logprobs.grad, torch.tensor(gradient, dtype=torch.float64))
    expected = {**counts, "num_tokens": int(mask.sum()), "ppo_kl": -log_ratios[mask].sum().item()}
    assert {name: value.item() for name, value in metrics.items()} == pytest.approx(expected, rel=1e-12, abs=1e-15)
    assert not any(value.requires_grad for value in metrics.values())


@given(seeds, st.floats(0, 1), st.floats(0, 1), st.none() | st.floats(1.01, 4))
@settings(max_examples=60, deadline=None)
def test_ppo_agrees_with_the_papers_objective_token_by_token(seed, clip_low, clip_high, c):
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


@given(seeds, st.floats(0.01, 0.5), st.floats(0.01, 0.5))
@settings(max_examples=60, deadline=None)
def test_sequence_mean_of_gspo_and_gmpo_is_the_papers_sequence_objective(seed, clip_low, clip_high):
    """One advantage per response: value and gradient, by autograd, of the mean of what the papers' objectives say."""
    generator = torch.Generator().manual_seed(seed)
    new, old = torch.randn(2, 6, 5, generator=generator, dtype=torch.float64)
    advantages = torch.randn(6, 1, generator=generator, dtype=torch.float64)
    lengths = torch.randint(1, 6, (6, 1), generator=generator)
    mask = torch.arange(5) < lengths

    def gspo_objective(log_ratio):
        s = ((log_ratio * mask).sum(1, keepdim=True) / lengths).exp()
        return torch.minimum(s * advantages, s.clamp(1 - clip_low, 1 + clip_high) * advantages)

    def gmpo_objective(log_ratio):
        sign = advantages.sign()
        clipped = sign * torch.minimum(sign * log_ratio, sign * log_ratio.clamp(-clip_low, clip_high))
        return advantages * ((clipped * mask).sum(1, keepdim=True) / lengths).exp()

    for loss, objective in ((gspo_loss, gspo_objective), (gmpo_loss, gmpo_objective)):
        ours, reference = new.clone().requires_grad_(), new.clone().requires_grad_()
        losses, _ = loss(ours, old, advantages.expand(6, 5), mask, clip_low, clip_high)
        actual, expected = sequence_mean(losses, mask, 6), -objective(reference - old).mean()
        actual.backward()
        expected.backward()
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(ours.grad, reference.grad, rtol=1e-10, atol=1e-12)


@given(seeds, st.floats(0, 1), st.floats(0, 2))
@settings(max_examples=60, deadline=None)
def test_cispo_is_the_policy_gradient_with_a_bounded_weight(seed, clip_low, clip_high):
    generator = torch.Generator().manual_seed(seed)
    new, old, advantages = torch.randn(3, 4, 5, generator=generator, dtype=torch.float64)
    mask = torch.rand(4, 5, generator=generator) < 0.7
    ours = new.clone().requires_grad_()
    losses, metrics = cispo_loss(ours, old, advantages, mask, clip_low, clip_high)
    losses.sum().backward()
    # The gradient of -r A is -r A; the weight r is bounded.
    ratio = (new - old).exp()
    expected = -ratio.clamp(1 - clip_low, 1 + clip_high) * advantages * mask
    torch.testing.assert_close(ours.grad, expected, rtol=1e-9, atol=1e-12)
    clipped = (ratio < 1 - clip_low) | (ratio > 1 + clip_high)
    assert metrics["pg_clipfrac"].item() == int((mask & clipped).sum())


@pytest.mark.parametrize("c", [1.0, -3.0, NAN, math.inf])
def test_dual_clip_ratio_is_checked(c):
    with pytest.raises(ValueError, match="clip_ratio_c"):
        ppo_clip_loss(*(torch.ones(1, 1),) * 4, 0.2, 0.2, clip_ratio_c=c)


@pytest.mark.parametrize("taus", [(0.0, 1.0), (1.0, -1.0)])
def test_temperatures_are_checked(taus):
    with pytest.raises(ValueError, match="must be above 0"):
        POLICY_LOSSES["sapo"](*(torch.ones(1, 1),) * 4, *taus)
