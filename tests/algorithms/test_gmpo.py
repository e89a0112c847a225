"""GMPO against values computed by hand."""

import math

import pytest
import torch

from verl.algorithms.losses import gmpo_loss, sequence_mean


@pytest.mark.parametrize(
    ("advantage", "log_s", "clipped", "moved"),
    [
        # log-ratios 0.9, -0.9, 0.1; from above only the first passes 0.4, from below only the second -0.4
        (2.0, (0.4 - 0.9 + 0.1) / 3, 1, [False, True, True]),
        (-1.0, (0.9 - 0.4 + 0.1) / 3, 1, [True, False, True]),
        (0.0, (0.9 - 0.9 + 0.1) / 3, 0, [False, False, False]),
    ],
)
def test_each_log_ratio_is_clipped_and_their_mean_is_the_responses_ratio(advantage, log_s, clipped, moved):
    old = torch.tensor([[-2.0, -1.0, -3.0, -1.0]])
    logprobs = (old + torch.tensor([[0.9, -0.9, 0.1, math.nan]])).requires_grad_()
    mask = torch.tensor([[1, 1, 1, 0]])
    losses, metrics = gmpo_loss(logprobs, old, torch.full((1, 4), advantage), mask, 0.4, 0.4)
    expected = -advantage * math.exp(log_s)
    torch.testing.assert_close(losses.detach(), torch.tensor([[expected, expected, expected, 0.0]]))
    assert {name: round(value.item(), 6) for name, value in metrics.items()} == {
        "pg_clipfrac": clipped,
        "ppo_kl": -0.1,
        "num_tokens": 3,
    }
    sequence_mean(losses, mask, 1).backward()
    # d loss / d logp of a token that is not clipped: -A s / 3.
    torch.testing.assert_close(logprobs.grad, torch.tensor([[expected / 3 * on for on in [*moved, False]]]))


def test_the_advantage_is_the_responses_mean():
    old = torch.zeros(1, 2)
    losses, _ = gmpo_loss(old, old, torch.tensor([[1.0, 2.0]]), torch.ones(1, 2), 0.4, 0.4)
    assert losses.tolist() == [[-1.5, -1.5]]


def test_ranges_below_0_are_refused():
    with pytest.raises(ValueError, match="clip_low=-0.1: must be at least 0"):
        gmpo_loss(*(torch.zeros(1, 1),) * 4, -0.1, 0.4)


def test_an_unclipped_ratio_stays_finite():
    # With A > 0, a log-ratio below -clip_low is not clipped; with A < 0, one above clip_high.
    losses, _ = gmpo_loss(torch.zeros(1, 1), torch.full((1, 1), -900.0), -torch.ones(1, 1), torch.ones(1, 1), 0.4, 0.4)
    assert losses.item() == pytest.approx(math.exp(20), rel=1e-6)
