import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.algorithms.advantages import gae_advantages, reinforce_plus_plus_advantages, whitened

NAN = float("nan")


def f64(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_literal_advantages():
    rewards, mask = f64([0.0, 4.0], [2.0, NAN]), torch.tensor([[1, 1], [1, 0]])
    # gamma = 1/2: returns 2, 4 and 2 have mean 8/3 and unbiased variance (4/9 + 16/9 + 4/9) / 2 = 4/3.
    std = (4 / 3) ** 0.5 + 1e-8
    expected = f64([-2 / 3 / std, 4 / 3 / std], [-2 / 3 / std, 0.0])
    torch.testing.assert_close(reinforce_plus_plus_advantages(rewards, mask, gamma=0.5), expected, rtol=1e-12, atol=0)
    # gamma = 1: returns 4, 4 and 2 have mean 10/3 and the same variance.
    expected = f64([2 / 3 / std, 2 / 3 / std], [-4 / 3 / std, 0.0])
    torch.testing.assert_close(reinforce_plus_plus_advantages(rewards, mask, gamma=1.0), expected, rtol=1e-12, atol=0)
    # gamma = 0: the rewards 0, 4 and 2 themselves, mean 2 and std 2.
    expected = f64([-1.0, 1.0], [0.0, 0.0])
    torch.testing.assert_close(reinforce_plus_plus_advantages(rewards, mask, gamma=0.0), expected, rtol=1e-7, atol=0)


def test_gaps_are_skipped():
    # gamma = 1/2: the returns are 0 + 4/2 = 2 and 4, mean 3 and std sqrt 2.
    result = reinforce_plus_plus_advantages(f64([0.0, NAN, 4.0]), torch.tensor([[1, 0, 1]]), gamma=0.5)
    torch.testing.assert_close(result, f64([-(0.5**0.5), 0.0, 0.5**0.5]), rtol=1e-7, atol=0)


@given(st.integers(0, 2**31 - 1), st.floats(0.0, 1.0))
@settings(max_examples=40, deadline=None)
def test_equals_whitened_gae_of_a_critic_that_says_zero(seed, gamma):
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.randn(3, 5, generator=generator, dtype=torch.float64)
    mask = torch.rand(3, 5, generator=generator) < 0.7
    returns = gae_advantages(rewards, torch.zeros_like(rewards), mask, gamma, lam=1.0)[0]
    result = reinforce_plus_plus_advantages(rewards, mask, gamma)
    torch.testing.assert_close(result, whitened(returns, mask), rtol=1e-10, atol=1e-12)
