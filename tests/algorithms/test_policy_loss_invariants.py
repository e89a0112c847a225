"""What every policy loss promises, whatever its formula, and the critic's loss with it."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.algorithms.losses import POLICY_LOSSES, value_loss

NAN, INF = math.nan, math.inf
GATE = 1 / (1 + math.exp(1 - math.exp(0.5)))
UNCLIPPED = {
    "gpg": {},
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


def options_of(name, low, high):
    clips = {"clip_low": low, "clip_high": high, **(FURTHER[name] if name in FURTHER else {})}
    return UNCLIPPED[name] if name in UNCLIPPED else clips


@pytest.mark.parametrize(
    ("name", "advantage", "value", "gradient", "clipped"),
    [
        ("ppo_clip", 1.0, -1.2, 0.0, 1),
        ("ppo_clip, dual", -1.0, math.exp(0.5), math.exp(0.5), 0),
        ("gmpo", 1.0, -math.exp(0.2), 0.0, 1),
        ("cispo", 1.0, 1.2, -1.2, 1),
        ("gspo", -1.0, math.exp(0.5), math.exp(0.5), 0),
        ("gpg", 1.0, 1.0, -1.0, None),
        ("clip_cov", 1.0, -1.2, 0.0, 0),
        ("kl_cov", 1.0, 0.5 - math.exp(0.5), 1 - math.exp(0.5), None),
        ("sapo", 1.0, -4 * GATE, -4 * GATE * (1 - GATE) * math.exp(0.5), None),
    ],
)
def test_padding_and_empty_responses_never_matter(name, advantage, value, gradient, clipped):
    # One token counts: its log ratio is 0.5.
    logprobs = torch.tensor([[-1.0, NAN, -INF], [NAN, INF, -INF]], requires_grad=True)
    old = torch.tensor([[-1.5, 0.0, INF], [0.0, NAN, -INF]])
    advantages = torch.tensor([[advantage, NAN, INF], [NAN, -INF, 1.0]])
    mask = torch.tensor([[True, False, False], [False, False, False]])
    losses, metrics = LOSSES[name](logprobs, old, advantages, mask, **options_of(name, 0.2, 0.2))
    losses.sum().backward()
    torch.testing.assert_close(losses.detach(), torch.tensor([[value, 0.0, 0.0], [0.0, 0.0, 0.0]]))
    torch.testing.assert_close(logprobs.grad, torch.tensor([[gradient, 0.0, 0.0], [0.0, 0.0, 0.0]]))
    assert metrics["ppo_kl"].item() == pytest.approx(-0.5)
    assert metrics["num_tokens"].item() == 1
    assert "pg_clipfrac" not in metrics if clipped is None else metrics["pg_clipfrac"].item() == clipped


@pytest.mark.parametrize(
    ("name", "clip_low", "clip_high", "value", "gradient"),
    [
        ("ppo_clip", 0.2, 0.2, math.exp(20), 0.0),
        ("ppo_clip, dual", 0.2, 0.2, 3.0, 0.0),
        ("gmpo", 0.4, 0.4, math.exp(20), 0.0),
        ("cispo", 1.0, INF, -math.exp(20), math.exp(20)),
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
def test_metrics_add_over_micro_batches_and_padding_width_does_not_matter(name, seed):
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


@pytest.mark.parametrize("name", [name for name in LOSSES if name not in UNCLIPPED])
@pytest.mark.parametrize(("low", "high"), [(-0.1, 0.2), (1.1, 0.2), (0.2, -0.1), (0.2, NAN)])
def test_clip_ranges_are_checked(name, low, high):
    if name == "gmpo" and low > 1:
        low = NAN  # it clips log-ratios, which may be below -1
    ones = torch.ones(1, 1)
    with pytest.raises(ValueError, match="clip_"):
        LOSSES[name](ones, ones, ones, ones, **options_of(name, low, high))
