import math

import torch

from verl.algorithms.advantages import gpg_advantages
from verl.algorithms.losses import gpg_loss


def test_literal_advantages():
    # Group 7 has scores 1 and 0, group 3 has 0, 0 and 3; two of five scores are not 0.
    rewards = torch.tensor([[0.0, 1.0], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0], [2.0, 1.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 1], [1, 0], [1, 1], [1, 1], [1, 1]])
    groups = torch.tensor([7, 7, 3, 3, 3])
    advantages = gpg_advantages(rewards, mask, groups, mask)
    assert advantages.tolist() == [[1.25, 1.25], [-1.25, 0.0], [-2.5, -2.5], [-2.5, -2.5], [5.0, 5.0]]
    assert gpg_advantages(0 * rewards, mask, groups, mask).abs().sum() == 0
    # Filler, here group 3, does not scale the others: one of two scores is not 0. It keeps its place in its group.
    learned = mask * torch.tensor([1, 1, 0, 0, 0])[:, None]
    assert gpg_advantages(rewards, mask, groups, learned)[:, 0].tolist() == [1.0, -1.0, -2.0, -2.0, 4.0]
    assert gpg_advantages(rewards, mask, groups, 0 * mask).abs().sum() == 0


def test_literal_losses_and_gradients():
    logprobs = torch.tensor([[math.log(0.5), math.log(0.25)]], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([[math.log(0.25), math.log(0.25)]], dtype=torch.float64)
    losses, metrics = gpg_loss(logprobs, old, torch.tensor([[3.0, -1.0]], dtype=torch.float64), torch.ones(1, 2))
    losses.sum().backward()
    expected = torch.tensor([[3 * math.log(2), -math.log(4)]], dtype=torch.float64)
    torch.testing.assert_close(losses.detach(), expected)
    assert logprobs.grad.tolist() == [[-3.0, 1.0]]
    torch.testing.assert_close(metrics["ppo_kl"], torch.tensor(-math.log(2), dtype=torch.float64))
    assert metrics["num_tokens"].item() == 2 and not metrics["ppo_kl"].requires_grad
