import math

import pytest
import torch

from verl.algorithms.losses import sapo_loss


def test_literal_losses_and_gradients():
    # Ratios 2, 1/2 and 1; temperatures 1 for the positive advantage and 2 for the others.
    logprobs = torch.tensor([[2.0, 0.5, 1.0]], dtype=torch.float64).log().requires_grad_()
    advantages = torch.tensor([[3.0, -1.0, 0.0]], dtype=torch.float64)
    losses, metrics = sapo_loss(logprobs, torch.zeros(1, 3), advantages, torch.ones(1, 3), 1.0, 2.0)
    up, down = (1 / (1 + math.exp(-x)) for x in (1.0, -1.0))
    torch.testing.assert_close(losses, torch.tensor([[-12 * up, 2 * down, 0.0]], dtype=torch.float64))
    losses.sum().backward()
    slopes = [[-12 * up * (1 - up) * 2, 4 * down * (1 - down) * 0.5, 0.0]]
    torch.testing.assert_close(logprobs.grad, torch.tensor(slopes, dtype=torch.float64))
    assert metrics["num_tokens"].item() == 3 and metrics["ppo_kl"].item() == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("taus", [(0.0, 1.0), (1.0, -1.0)])
def test_temperatures_are_checked(taus: tuple[float, float]):
    ones = torch.ones(1, 1)
    with pytest.raises(ValueError, match="must be above 0"):
        sapo_loss(ones, ones, ones, ones, *taus)
