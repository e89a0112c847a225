"""Policy losses, the critic's loss and their gradients: by hand, by the papers, and what all promise."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.algorithms.losses import POLICY_LOSSES
from verl.algorithms.losses.aggregate import sequence_mean
from verl.algorithms.losses.per_token import (
    clip_cov_loss,
    covariances,
    gmpo_loss,
    gspo_loss,
    kl_cov_loss,
    ppo_clip_loss,
    value_loss,
)

NAN, INF = math.nan, math.inf
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
    # beta / 2 = 1; log-ratios log 2 and 0.
    "dro": (
        {"dro_beta": 2.0},
        [[2.0, 1.0]],
        [[3.0, -1.0]],
        [[3 * math.log(2) + math.log(2) ** 2, -math.log(2)]],
        [[-3.0 + 2 * math.log(2), 1.0]],
        {},
    ),
    # p is 0.5 and was 0.25, 0.4, 0.625, 1 and 0.25.
    "dppo_tv": (
        {"clip_low": 0.2, "clip_high": 0.15, "clip_ratio_c": 1.5},
        [[2.0, 1.25, 0.8, 0.5, 2.0, math.nan]],
        [[1.0, 1.0, -1.0, -1.0, -1.0, 1.0]],
        [[0.0, 1.25 * math.log(2), -0.8 * math.log(2), 0.0, -1.5 * math.log(2), 0.0]],
        [[0.0, -1.25, 0.8, 0.0, 1.5, 0.0]],
        {"pg_clipfrac": 2, "pg_clipfrac_lower": 1},
    ),
    # Divergences of 0.131, 0.020, 0.032 and 0.131 nats.
    "dppo_kl": (
        {"clip_low": 0.025, "clip_high": 0.05},
        [[2.0, 1.25, 0.8, 2.0]],
        [[1.0, 1.0, -1.0, -1.0]],
        [[0.0, 1.25 * math.log(2), 0.0, -2 * math.log(2)]],
        [[0.0, -1.25, 0.0, 2.0]],
        {"pg_clipfrac": 2, "pg_clipfrac_lower": 0},
    ),
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


@given(seeds, st.floats(0.01, 0.3), st.floats(0.01, 0.3), st.none() | st.floats(1.01, 4))
@settings(max_examples=60, deadline=None)
def test_dppo_leaves_out_tokens_by_their_divergence(seed, clip_low, clip_high, c):
    generator = torch.Generator().manual_seed(seed)
    new, old = -torch.rand(2, 4, 5, generator=generator, dtype=torch.float64) * 3 - 0.01
    advantages = torch.randn(4, 5, generator=generator, dtype=torch.float64)
    options = {"clip_low": clip_low, "clip_high": clip_high, "clip_ratio_c": c}
    for name in ("dppo_tv", "dppo_kl"):
        logprobs = new.clone().requires_grad_()
        losses, metrics = POLICY_LOSSES[name](logprobs, old, advantages, torch.ones(4, 5), **options)
        losses.sum().backward()
        num_out = 0
        for i in range(4):
            for j in range(5):
                a, p, q = float(advantages[i, j]), math.exp(new[i, j]), math.exp(old[i, j])
                kl = q * math.log(q / p) + (1 - q) * math.log((1 - q + 1e-8) / (1 - p + 1e-8))
                moved, bound = (p > q, clip_high) if a > 0 else (p < q, clip_low)
                out = moved and (kl if name == "dppo_kl" else abs(p - q)) > bound
                weight = 0.0 if out else min(p / q, c or math.inf)
                assert losses[i, j].item() == pytest.approx(-weight * a * math.log(p), rel=1e-9)
                assert logprobs.grad[i, j].item() == pytest.approx(-weight * a, rel=1e-9)
                num_out += out
        assert metrics["pg_clipfrac"].item() == num_out


@given(seeds, st.floats(0.01, 0.5), st.floats(0.01, 0.5))
@settings(max_examples=60, deadline=None)
def test_gspo_and_gmpo_match_the_sequence_objective(seed, clip_low, clip_high):
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


UNCLIPPED = {
    "gpg": {},
    "dro": {"dro_beta": 0.1},
    "sapo": {"tau_pos": 1.0, "tau_neg": 1.05},
    "kl_cov": {"kl_cov_ratio": 0.1, "ppo_kl_coef": 1.0},
    "value": {"clip_range": 0.5},
}
"""The losses without a clip range, and their options."""
FURTHER = {
    "ppo_clip, dual": {"clip_ratio_c": 3.0},
    "clip_cov": {"clip_cov_ratio": 0.1, "clip_cov_lb": 1.0, "clip_cov_ub": 5.0},
}
"""Options besides the clip range."""
LOSSES = POLICY_LOSSES | {"ppo_clip, dual": POLICY_LOSSES["ppo_clip"], "value": value_loss}
OF_A_BATCH = ("clip_cov", "kl_cov")
"""The losses that compare the tokens of a micro-batch with each other."""
CLIPPED = [name for name in LOSSES if name not in UNCLIPPED]


def options_of(name, low, high):
    clips = {"clip_low": low, "clip_high": high, **(FURTHER[name] if name in FURTHER else {})}
    return UNCLIPPED[name] if name in UNCLIPPED else clips


@pytest.mark.parametrize("name", LOSSES)
def test_padding_and_empty_responses_never_matter(name):
    logprobs, old, advantages = torch.randn(3, 3, 4, generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 0]]).bool()

    def loss_and_gradient(*padding):
        inputs = [t.where(mask, value) for t, value in zip((logprobs, old, advantages), padding, strict=True)]
        learning = inputs[0].requires_grad_()
        losses, metrics = LOSSES[name](learning, *inputs[1:], mask, **options_of(name, 0.2, 0.2))
        losses.sum().backward()
        return losses.detach(), learning.grad, *metrics.values()

    clean = loss_and_gradient(0.0, 0.0, 0.0)
    assert clean[0][mask].any() and not clean[0][~mask].any() and not clean[1][~mask].any()
    for padding in ((NAN, INF, NAN), (-INF, -INF, INF), (INF, NAN, -INF), (7.0, -3.0, 1.0)):
        assert all(torch.equal(a, b) for a, b in zip(loss_and_gradient(*padding), clean, strict=True))


@pytest.mark.parametrize(
    ("name", "clip_low", "clip_high", "value", "gradient"),
    [
        ("ppo_clip", 0.2, 0.2, math.exp(20), 0.0),
        ("ppo_clip, dual", 0.2, 0.2, 3.0, 0.0),
        ("gmpo", 0.4, 0.4, math.exp(20), 0.0),
        ("cispo", 1.0, INF, -math.exp(20), math.exp(20)),
        ("dppo_tv", 0.2, 0.2, -math.exp(20), math.exp(20)),
        ("dppo_kl", 0.2, 0.2, -math.exp(20), math.exp(20)),
        ("gspo", 0.2, 0.2, math.exp(20), 0.0),
        ("gpg", None, None, -1.0, 1.0),
        ("sapo", None, None, 4 / 1.05, 0.0),
    ],
)
def test_huge_log_ratio_stays_finite(name, clip_low, clip_high, value, gradient):
    logprobs = torch.full((1, 2), -1.0, requires_grad=True)
    old, ones = torch.full((1, 2), -200.0), torch.ones(1, 2)
    losses, _ = LOSSES[name](logprobs, old, -ones, ones, **options_of(name, clip_low, clip_high))
    losses.sum().backward()
    torch.testing.assert_close(losses.detach(), torch.full((1, 2), value))
    torch.testing.assert_close(logprobs.grad, torch.full((1, 2), gradient))


@pytest.mark.parametrize("name", [name for name in LOSSES if name not in OF_A_BATCH])
@given(st.integers(0, 2**31 - 1))
@settings(max_examples=30, deadline=None)
def test_metrics_add_over_micro_batches(name, seed):
    generator = torch.Generator().manual_seed(seed)
    new, old, advantages = torch.randn(3, 6, 5, generator=generator, dtype=torch.float64)
    mask = torch.rand(6, 5, generator=generator) < 0.7
    mask[:, 3:] = False
    batch, options = (new, old, advantages, mask), options_of(name, 0.2, 0.3)
    losses, whole = LOSSES[name](*batch, **options)
    parts = [LOSSES[name](*(t[rows] for t in batch), **options) for rows in torch.arange(6).split([1, 3, 2])]
    torch.testing.assert_close(torch.cat([part[0] for part in parts]), losses)
    for metric, value in whole.items():
        torch.testing.assert_close(sum(part[1][metric] for part in parts), value)
    narrow, _ = LOSSES[name](*(t[:, :3] for t in batch), **options)
    torch.testing.assert_close(narrow, losses[:, :3])


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        *(("ppo_clip, dual", {"clip_ratio_c": c}, "clip_ratio_c") for c in (1.0, NAN, INF)),
        *(("sapo", {option: tau}, "must be above 0") for option, tau in (("tau_pos", 0.0), ("tau_neg", -1.0))),
        *(("dro", {"dro_beta": beta}, "must be above 0") for beta in (0.0, NAN)),
        *(("value", {"clip_range": size}, "clip_range") for size in (0.0, -0.5, NAN)),
        *((name, {"clip_low": -0.1}, "clip_low=-0.1") for name in CLIPPED),
        *((name, {"clip_low": NAN if name == "gmpo" else 1.1}, "clip_low=") for name in CLIPPED),
        *((name, {"clip_high": size}, "clip_high=") for name in CLIPPED for size in (-0.1, NAN)),
    ],
)
def test_options_are_checked(name, options, message):
    with pytest.raises(ValueError, match=message):
        LOSSES[name](*(torch.ones(1, 1),) * 4, **options_of(name, 0.2, 0.2) | options)


# Means over the mask: advantages 0, log-probabilities -2.
ADVANTAGES = torch.tensor([[2.0, -2.0, 1.0], [-1.0, 9.0, 9.0]], dtype=torch.float64)
LOGPROBS = torch.tensor([[-1.0, -3.5, -0.5], [-3.0, 9.0, 9.0]], dtype=torch.float64)
MASK = torch.tensor([[1, 1, 1], [1, 0, 0]])
COVARIANCES = [[2.0, 3.0, 1.5], [1.0, 0.0, 0.0]]


def test_covariances():
    assert covariances(LOGPROBS, ADVANTAGES, MASK.bool()).tolist() == COVARIANCES


def test_some_tokens_between_the_bounds_learn_nothing():
    logprobs = LOGPROBS.clone().requires_grad_()
    old = LOGPROBS.clone()
    old[0, 1] += 1.0  # its ratio falls below the clip, where a negative advantage has no say
    losses, metrics = clip_cov_loss(logprobs, old, ADVANTAGES, MASK, 0.2, 0.2, 0.5, 1.4, 5.0)
    # Half of four tokens: of the first, second and third the second is clipped already.
    assert losses[0, [0, 2]].tolist() == [0.0, 0.0] and losses[1].tolist() == [1.0, 0.0, 0.0]
    torch.testing.assert_close(losses[0, 1].item(), 1.6)
    assert (metrics["pg_clipfrac"].item(), metrics["num_tokens"].item()) == (2, 4)
    losses.sum().backward()
    assert logprobs.grad.tolist() == [[0.0, 0.0, 0.0], [1.0, 0.0, 0.0]]
    # At least one is drawn, the same again, and another where the numbers differ.
    for low, number in ((1.4, 1), (2.5, 0)):
        options = (0.2, 0.2, 1e-4, low, 5.0)
        first, again = (clip_cov_loss(LOGPROBS, old, ADVANTAGES, MASK, *options) for _ in range(2))
        assert first[1]["pg_clipfrac"].item() == number and torch.equal(first[0], again[0])
    # The second's is above the upper bound.
    losses, _ = clip_cov_loss(LOGPROBS, LOGPROBS, ADVANTAGES, MASK, 0.2, 0.2, 1.0, 1.4, 2.5)
    assert losses.tolist() == [[0.0, 2.0, 0.0], [1.0, 0.0, 0.0]]
    drawn = set()
    for changed in (LOGPROBS * (1 + 1e-3 * step) for step in range(20)):
        losses, _ = clip_cov_loss(changed, changed, ADVANTAGES, MASK, 0.2, 0.2, 1e-4, 1.4, 5.0)
        drawn |= set((losses[0] == 0).nonzero().flatten().tolist())
    assert drawn == {0, 1, 2}


def test_draw_ignores_padding_masked_rows_and_rounding():
    generator = torch.Generator().manual_seed(0)
    logprobs, advantages = torch.randn(4, 50, generator=generator) - 2, torch.randn(4, 50, generator=generator)
    old, mask = logprobs.clone(), torch.ones(4, 50)
    options = (0.2, 0.2, 0.1, -9.0, 9.0)
    losses, metrics = clip_cov_loss(logprobs, old, advantages, mask, *options)
    assert metrics["pg_clipfrac"].item() == 20
    copies = [torch.nn.functional.pad(torch.cat([t, t[:2]]), (0, 3)) for t in (logprobs, old, advantages, mask)]
    copies[3][4:] = 0
    for inputs in ([logprobs * (1 + 1e-6), old, advantages, mask], copies):
        found, _ = clip_cov_loss(*inputs, *options)
        assert torch.equal(found[:4, :50] == 0, losses == 0)


def test_tokens_of_largest_covariance_are_penalised():
    logprobs = LOGPROBS.clone().requires_grad_()
    old = LOGPROBS - torch.tensor([[2.0, 0.5, 2.0], [1.0, 1.0, 1.0]], dtype=torch.float64).log()
    losses, metrics = kl_cov_loss(logprobs, old, ADVANTAGES, MASK, 0.5, 3.0)
    log2 = torch.tensor(2.0, dtype=torch.float64).log().item()
    expected = torch.tensor([[-4 + 3 * log2, 1 + 3 * log2, -2], [1, 0, 0]], dtype=torch.float64)
    torch.testing.assert_close(losses.detach(), expected)
    losses.sum().backward()
    slopes = torch.tensor([[-4 + 3.0, 1 - 3.0, -2], [1, 0, 0]], dtype=torch.float64)
    torch.testing.assert_close(logprobs.grad, slopes)
    assert metrics["num_tokens"].item() == 4
    nothing, _ = kl_cov_loss(LOGPROBS, old, ADVANTAGES, 0 * MASK, 0.5, 3.0)
    assert nothing.abs().sum() == 0


def f64(values, **options):
    return torch.tensor(values, dtype=torch.float64, **options)


def test_literal_losses_of_a_critic():
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


def test_within_the_range_nothing_counts_as_clipped():
    # In float32, old + (values - old) would differ from values by a rounding.
    values, old, returns = torch.randn(3, 40, 5, generator=torch.Generator().manual_seed(0))
    for clip_range in (20.0, INF):
        losses, metrics = value_loss(values, old, returns, torch.ones(40, 5), clip_range)
        assert metrics["vf_clipfrac"].item() == 0
        assert torch.equal(losses, 0.5 * (values - returns).square())
