"""Confucius3's entropy term, against numbers by hand."""

import pytest
import torch

from tests.recipes.loss_inputs import loss_inputs
from verl.algorithms.losses import ppo_clip_loss
from verl.recipes.confucius3 import side_of_target, targeted_entropy_loss


@pytest.mark.parametrize(("target", "side"), [(0.5, 1.0), (0.75, -1.0), (0.625, 0.0)])
def test_the_entropy_is_drawn_to_the_target(target: float, side: float):
    mask = torch.tensor([[True, True, False], [True, True, False]])
    before = torch.tensor([[0.5, 1.0, 9.0], [0.25, 0.75, 9.0]])  # of four tokens, 0.625
    zeros = torch.zeros(2, 3)
    mini = loss_inputs([[0.0] * 3] * 2, mask.int().tolist(), old_entropy=before)
    found = side_of_target(mini, target=target, coef=0.1)["side"]
    assert found.tolist() == [side, side]
    entropy = torch.full((2, 3), 0.5, requires_grad=True)
    given = {"advantages": zeros + 1, "entropy": entropy, "prepared": {"side": found}}
    inputs = loss_inputs([[0.0] * 3] * 2, mask.int().tolist(), **given)
    losses, _ = targeted_entropy_loss(inputs, target=target, coef=0.1)
    plain, _ = ppo_clip_loss(inputs.logprobs, inputs.old_logprobs, inputs.advantages, mask, 0.2, 0.2)
    torch.testing.assert_close(losses - plain, mask * (0.1 * side * 0.5))
    losses.sum().backward()
    torch.testing.assert_close(entropy.grad, mask * (0.1 * side))
