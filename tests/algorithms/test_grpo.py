import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.algorithms.advantages import grpo_advantages


def test_literal_advantages():
    # Group 7 has scores 1 and -1 (mean 0, unbiased std sqrt 2); group 3 has 1, 0.5, 0 (mean 0.5, std 0.5).
    rewards = torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.25, 0.25], [-1.0, 0.0], [0.0, 0.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 1], [1, 0], [1, 1], [1, 0], [1, 1]])
    groups = torch.tensor([7, 3, 3, 7, 3])
    a, b = 1 / (2**0.5 + 1e-6), 0.5 / (0.5 + 1e-6)
    expected = torch.tensor([[a, a], [b, 0], [0, 0], [-a, 0], [-b, -b]], dtype=torch.float64)
    torch.testing.assert_close(grpo_advantages(rewards, mask, groups, norm_by_std=True), expected, rtol=1e-12, atol=0)
    expected = torch.tensor([[1, 1], [0.5, 0], [0, 0], [-1, 0], [-0.5, -0.5]], dtype=torch.float64)
    torch.testing.assert_close(grpo_advantages(rewards, mask, groups, norm_by_std=False), expected, rtol=1e-12, atol=0)


@given(st.integers(0, 2**31 - 1), st.integers(1, 4), st.integers(2, 5), st.booleans())
@settings(max_examples=40, deadline=None)
def test_groups_are_independent_of_order_and_of_each_other(seed, num_groups, size, norm_by_std):
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.randn(num_groups * size, 3, generator=generator, dtype=torch.float64)
    mask = torch.ones_like(rewards)
    groups = torch.arange(num_groups).repeat(size) * 1000 - 500
    order = torch.randperm(num_groups * size, generator=generator)
    whole = grpo_advantages(rewards, mask, groups, norm_by_std)
    permuted = grpo_advantages(rewards[order], mask[order], groups[order], norm_by_std)
    torch.testing.assert_close(permuted, whole[order], rtol=1e-10, atol=1e-12)
    for group in groups.unique():
        mine = groups == group
        alone = grpo_advantages(rewards[mine], mask[mine], groups[mine], norm_by_std)
        torch.testing.assert_close(alone, whole[mine], rtol=1e-10, atol=1e-12)
        assert float(alone[:, 0].sum()) == pytest.approx(0.0, abs=1e-9)
