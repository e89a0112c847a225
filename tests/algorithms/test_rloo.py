import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.algorithms.advantages import grpo_advantages, rloo_advantages


def test_literal_advantages():
    # Group 7 has scores 1 and -1; group 3 has 1, 0.5 and 0, whose others have means 0.25, 0.5 and 0.75.
    rewards = torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.25, 0.25], [-1.0, 0.0], [0.0, 0.0]])
    mask = torch.tensor([[1, 1], [1, 0], [1, 1], [1, 0], [1, 1]])
    advantages = rloo_advantages(rewards, mask, torch.tensor([7, 3, 3, 7, 3]))
    assert advantages.tolist() == [[2.0, 2.0], [0.75, 0.0], [0.0, 0.0], [-2.0, 0.0], [-0.75, -0.75]]
    assert advantages.dtype == torch.float32


@given(st.integers(0, 2**31 - 1), st.integers(1, 4), st.integers(2, 5))
@settings(max_examples=40, deadline=None)
def test_proportional_to_grpo_without_std(seed, num_groups, size):
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.randn(num_groups * size, 3, generator=generator, dtype=torch.float64)
    mask = torch.ones_like(rewards)
    groups = torch.arange(num_groups).repeat(size)
    expected = grpo_advantages(rewards, mask, groups, norm_by_std=False) * size / (size - 1)
    torch.testing.assert_close(rloo_advantages(rewards, mask, groups), expected, rtol=1e-10, atol=1e-12)


@given(st.integers(0, 2**31 - 1), st.floats(-10.0, 10.0))
@settings(max_examples=40, deadline=None)
def test_a_responses_own_score_is_not_in_its_baseline(seed, change):
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.randn(4, 1, generator=generator, dtype=torch.float64)
    mask, groups = torch.ones(4, 1), torch.zeros(4, dtype=torch.int64)
    before = rloo_advantages(rewards, mask, groups)
    rewards[2] += change
    shift = rloo_advantages(rewards, mask, groups) - before
    expected = torch.tensor([[-change / 3], [-change / 3], [change], [-change / 3]], dtype=torch.float64)
    torch.testing.assert_close(shift, expected, rtol=0, atol=1e-12)
