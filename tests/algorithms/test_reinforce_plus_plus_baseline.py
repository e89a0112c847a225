import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.algorithms.advantages import grpo_advantages, reinforce_plus_plus_baseline_advantages, whitened


def test_literal_advantages():
    # Group 7 has scores 3 and 1 (mean 2) on 2 tokens and 1; group 3 has 0 and 0 on one token each.
    # Tokens 1, 1, -1, 0, 0: mean 0.2, unbiased variance (0.64 + 0.64 + 1.44 + 0.04 + 0.04) / 4 = 0.7.
    rewards = torch.tensor([[1.0, 2.0], [0.0, 9.0], [1.0, 9.0], [0.0, 9.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 1], [1, 0], [1, 0], [1, 0]])
    std = 0.7**0.5 + 1e-8
    expected = torch.tensor([[0.8, 0.8], [-0.2, 0.0], [-1.2, 0.0], [-0.2, 0.0]], dtype=torch.float64) / std
    advantages = reinforce_plus_plus_baseline_advantages(rewards, mask, torch.tensor([7, 3, 7, 3]), mask)
    torch.testing.assert_close(advantages, expected, rtol=1e-12, atol=0)


def test_a_group_of_nearly_equal_scores_stays_small():
    # Scores 2 and 0 beside 1.125 and 0.875: 1, -1, 0.125 and -0.125 have variance (1 + 1 + 1/64 + 1/64) / 3 = 65/96.
    rewards = torch.tensor([[2.0], [0.0], [1.125], [0.875]])
    advantages = reinforce_plus_plus_baseline_advantages(
        rewards, torch.ones(4, 1), torch.tensor([0, 0, 1, 1]), torch.ones(4, 1)
    )
    std = (65 / 96) ** 0.5
    torch.testing.assert_close(advantages, torch.tensor([[1.0], [-1.0], [0.125], [-0.125]]) / std)


def test_responses_that_are_not_learned_from_count_in_their_group_alone():
    # Scores 3 and 1 (mean 2) and a third of 2, not learned from: 1 and -1 have mean 0 and unbiased variance 2.
    rewards, mask = torch.tensor([[3.0], [1.0], [2.0]], dtype=torch.float64), torch.ones(3, 1)
    learned = torch.tensor([[1], [1], [0]])
    advantages = reinforce_plus_plus_baseline_advantages(rewards, mask, torch.zeros(3, dtype=torch.int64), learned)
    expected = torch.tensor([[1.0], [-1.0], [0.0]], dtype=torch.float64) / (2**0.5 + 1e-8)
    torch.testing.assert_close(advantages, expected, rtol=1e-12, atol=0)


@given(st.integers(0, 2**31 - 1), st.integers(1, 4), st.integers(2, 5))
@settings(max_examples=40, deadline=None)
def test_equals_whitened_grpo_without_std(seed, num_groups, size):
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.randn(num_groups * size, 3, generator=generator, dtype=torch.float64)
    mask = torch.arange(3) < torch.randint(1, 4, (num_groups * size, 1), generator=generator)
    rewards = rewards.where(mask, 0.0)
    groups = torch.arange(num_groups).repeat(size)
    expected = whitened(grpo_advantages(rewards, mask, groups, norm_by_std=False), mask)
    result = reinforce_plus_plus_baseline_advantages(rewards, mask, groups, mask)
    torch.testing.assert_close(result, expected, rtol=1e-10, atol=1e-12)
