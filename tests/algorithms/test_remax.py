import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.algorithms.advantages import gae_advantages, remax_advantages

NAN = float("nan")


def test_literal_advantages():
    # Rewards to go: 7, 6, 4 minus 3; 1, 1 minus -0.5; with a gap 5, 4 minus 1.
    rewards = torch.tensor([[1.0, 2.0, 4.0], [0.0, 1.0, NAN], [1.0, NAN, 4.0], [9.0, 9.0, 9.0]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 1], [0, 0, 0]])
    advantages = remax_advantages(rewards, mask, torch.tensor([3.0, -0.5, 1.0, 2.0]))
    assert advantages.tolist() == [[4.0, 3.0, 1.0], [1.5, 1.5, 0.0], [4.0, 0.0, 3.0], [0.0, 0.0, 0.0]]
    assert advantages.dtype == torch.float32


def test_a_score_on_the_last_token_reaches_every_token():
    rewards = torch.tensor([[0.0, 0.0, 1.0], [0.0, -1.0, 0.0]])
    advantages = remax_advantages(rewards, torch.tensor([[1, 1, 1], [1, 1, 0]]), torch.tensor([0.5, 0.5]))
    assert advantages.tolist() == [[0.5, 0.5, 0.5], [-1.5, -1.5, 0.0]]


@given(st.integers(0, 2**31 - 1))
@settings(max_examples=40, deadline=None)
def test_equals_undiscounted_gae_of_a_critic_that_says_the_baseline(seed):
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.randn(3, 5, generator=generator, dtype=torch.float64)
    mask = torch.rand(3, 5, generator=generator) < 0.7
    baseline = torch.randn(3, generator=generator, dtype=torch.float64)
    expected = gae_advantages(rewards, baseline[:, None].expand(3, 5), mask, gamma=1.0, lam=1.0)[0]
    torch.testing.assert_close(remax_advantages(rewards, mask, baseline), expected, rtol=1e-10, atol=1e-12)
