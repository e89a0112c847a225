import torch

from verl.algorithms.advantages import opo_advantages


def test_literal_advantages():
    # Group 7 has a score of 1 with one token and a score of 0 with three: the mean weighted by length is 1/4.
    rewards = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 0, 0], [1, 1, 1]])
    advantages = opo_advantages(rewards, mask, torch.tensor([7, 7]))
    assert advantages.tolist() == [[0.75, 0.0, 0.0], [-0.25, -0.25, -0.25]]
