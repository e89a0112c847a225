import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.algorithms.advantages import gae_advantages

NAN = float("nan")


def f64(*values):
    return torch.tensor(values, dtype=torch.float64)


def batch(seed, num_tokens=5):
    """Rewards, values and a mask of three responses of random lengths; 100 and -100 on padding."""
    generator = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, 3, num_tokens, generator=generator, dtype=torch.float64)
    mask = torch.arange(num_tokens) < torch.randint(0, num_tokens + 1, (3, 1), generator=generator)
    return rewards.where(mask, 100.0), values.where(mask, -100.0), mask


def test_literal_advantages():
    # gamma = lam = 1/2, from the last token backwards. Three tokens: delta = 4 - 8 = -4, 2 + 8/2 - 4 = 2,
    # 1 + 4/2 - 2 = 1; A = -4, 2 - 4/4 = 1, 1 + 1/4 = 1.25.
    # Two tokens: delta = 1 - 0.25 = 0.75, 0 + 0.25/2 - 0.5 = -0.375; A = 0.75, -0.375 + 0.75/4 = -0.1875.
    rewards = f64([1.0, 2.0, 4.0], [0.0, 1.0, NAN], [5.0, 5.0, 5.0])
    values = f64([2.0, 4.0, 8.0], [0.5, 0.25, NAN], [5.0, 5.0, 5.0])
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [0, 0, 0]])
    advantages, returns = gae_advantages(rewards, values, mask, gamma=0.5, lam=0.5)
    assert advantages.tolist() == [[1.25, 1.0, -4.0], [-0.1875, 0.75, 0.0], [0.0, 0.0, 0.0]]
    assert returns.tolist() == [[3.25, 5.0, 4.0], [0.3125, 1.0, 0.0], [0.0, 0.0, 0.0]]


def test_gaps_are_skipped():
    # The last token's delta is 4 - 8 = -4; the first one's next value is 8: 1 + 8/2 - 2 = 3; A = 3 - 4/4 = 2.
    advantages, returns = gae_advantages(
        f64([9.0, 1.0, NAN, 4.0]), f64([9.0, 2.0, NAN, 8.0]), torch.tensor([[0, 1, 0, 1]]), gamma=0.5, lam=0.5
    )
    assert advantages.tolist() == [[0.0, 2.0, 0.0, -4.0]]
    assert returns.tolist() == [[0.0, 4.0, 0.0, 4.0]]


def test_computed_in_float64_and_returned_in_the_dtype_of_the_rewards():
    # 1 - 2**25 has no float32: the last return, that advantage plus 2**25, would come back as 0 instead of 1.
    rewards, values = torch.tensor([[2.0**25, 1.0]]), torch.tensor([[0.0, 2.0**25]], dtype=torch.float64)
    advantages, returns = gae_advantages(rewards, values, torch.ones(1, 2), gamma=1.0, lam=1.0)
    assert advantages.tolist() == [[2.0**25, -(2.0**25)]]
    assert returns.tolist() == [[2.0**25, 1.0]]
    assert advantages.dtype == returns.dtype == torch.float32


@given(st.integers(0, 2**31 - 1))
@settings(max_examples=40, deadline=None)
def test_without_discounting_it_is_the_reward_to_go_minus_the_value(seed):
    rewards, values, mask = batch(seed)
    advantages, returns = gae_advantages(rewards, values, mask, gamma=1.0, lam=1.0)
    for row, length in enumerate(mask.sum(1).tolist()):
        for t in range(length):
            to_go = float(rewards[row, t:length].sum())
            assert float(returns[row, t]) == pytest.approx(to_go, abs=1e-12)
            assert float(advantages[row, t]) == pytest.approx(to_go - float(values[row, t]), abs=1e-12)
    assert not advantages[~mask].any() and not returns[~mask].any()


@given(st.integers(0, 2**31 - 1), st.sampled_from([0.0, 0.5, 0.99, 1.0]))
@settings(max_examples=40, deadline=None)
def test_lam_zero_is_the_one_step_temporal_difference(seed, gamma):
    rewards, values, mask = batch(seed)
    values_after = torch.cat([values.where(mask, 0.0), values.new_zeros(3, 1)], dim=1)
    expected = (rewards + gamma * values_after[:, 1:] - values_after[:, :-1]).where(mask, 0.0)
    advantages, returns = gae_advantages(rewards, values, mask, gamma, lam=0.0)
    torch.testing.assert_close(advantages, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(returns, (expected + values).where(mask, 0.0), rtol=0, atol=1e-12)


@given(st.integers(0, 2**31 - 1), st.floats(0.0, 1.0), st.floats(0.0, 1.0))
@settings(max_examples=40, deadline=None)
def test_the_weighted_sum_of_the_paper(seed, gamma, lam):
    rewards, values, mask = batch(seed)
    advantages, _ = gae_advantages(rewards, values, mask, gamma, lam)
    deltas, _ = gae_advantages(rewards, values, mask, gamma, lam=0.0)
    for t in range(5):
        expected = sum((gamma * lam) ** (later - t) * deltas[:, later] for later in range(t, 5)) * mask[:, t]
        torch.testing.assert_close(advantages[:, t], expected, rtol=0, atol=1e-12)


@given(st.integers(0, 2**31 - 1), st.floats(0.0, 1.0), st.floats(0.0, 1.0))
@settings(max_examples=40, deadline=None)
def test_a_perfect_critic_leaves_no_advantage(seed, gamma, lam):
    rewards, _, mask = batch(seed)
    _, values = gae_advantages(rewards, torch.zeros_like(rewards), mask, gamma, lam=1.0)
    advantages, returns = gae_advantages(rewards, values, mask, gamma, lam)
    torch.testing.assert_close(advantages, torch.zeros_like(rewards), rtol=0, atol=1e-12)
    torch.testing.assert_close(returns, values, rtol=0, atol=1e-12)
