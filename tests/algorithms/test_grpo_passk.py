import pytest
import torch

from verl.algorithms.advantages import grpo_passk_advantages


@pytest.mark.parametrize(("norm_by_std", "lead"), [(False, 2.0), (True, 2 / ((7 / 3) ** 0.5 + 1e-6))])
def test_literal_advantages(norm_by_std: bool, lead: float):
    # Group 7 has scores 1, 4 and 2, of variance 7/3; the two best of group 3 are alike.
    rewards = torch.tensor([[1.0, 0.0], [1.0, 3.0], [0.0, 5.0], [2.0, 0.0], [5.0, 0.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 0], [1, 1], [1, 1], [1, 0], [1, 0]])
    advantages = grpo_passk_advantages(rewards, mask, torch.tensor([7, 7, 3, 7, 3]), norm_by_std)
    expected = [[0, 0], [lead, lead], [0, 0], [0, 0], [0, 0]]
    torch.testing.assert_close(advantages, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=0)
