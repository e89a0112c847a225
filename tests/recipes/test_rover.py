"""ROVER against numbers worked out by hand."""

import torch

from tests.recipes.loss_inputs import loss_inputs
from verl.recipes.rover import rover_loss


def test_the_bellman_error_of_each_token():
    # Q = 2 (0.5, -1); the mean of Q at the second token is 2 (-3 + 4) = 2, and nothing follows it.
    inputs = loss_inputs(
        [[-1.0, -3.0, 0.0]],
        [[1, 1, 0]],
        old_logprobs=torch.tensor([[-1.5, -2.0, 0.0]]),
        advantages=torch.tensor([[0.25, 0.25, 0.25]]),
        statistics={"mean_logprob": torch.tensor([[-9.0, -3.0, -7.0]], requires_grad=True)},
        old_statistics={"mean_logprob": torch.tensor([[-5.0, -4.0, 0.0]])},
    )
    losses, metrics = rover_loss(inputs, rho=2.0)
    # (1 - 0.25 - 2)^2 and (-2 - 0.25)^2
    torch.testing.assert_close(losses[:, :2], torch.tensor([[1.5625, 5.0625]]))
    assert (metrics["rover_q"].item(), metrics["rover_next_value"].item()) == (-1.0, 2.0)
    losses[:, :2].sum().backward()
    # 2 rho (Q - target); none goes through the target.
    torch.testing.assert_close(inputs.logprobs.grad, torch.tensor([[-5.0, -9.0, 0.0]]))
    assert inputs.statistics["mean_logprob"].grad is None


def test_before_the_first_step_it_is_a_policy_gradient():
    advantages = torch.tensor([[0.5, 0.5], [-1.0, -1.0]])
    mean = {"mean_logprob": torch.tensor([[-3.0, -4.0], [-5.0, -6.0]])}
    options = {"advantages": advantages, "statistics": mean, "old_statistics": mean}
    inputs = loss_inputs([[0.0, 0.0], [0.0, 0.0]], [[1, 1], [1, 1]], **options)
    rover_loss(inputs)[0].sum().backward()
    torch.testing.assert_close(inputs.logprobs.grad, -2 * advantages)
