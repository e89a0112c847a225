"""The 80/20 rule against numbers worked out by hand."""

import pytest
import torch

from tests.recipes.loss_inputs import loss_inputs
from verl.recipes.top_entropy import top_entropy_loss, top_entropy_weights

ENTROPY = torch.tensor([[0.1, 2.0, 9.0], [3.0, 0.2, 0.3]])
MASK = torch.tensor([[1, 1, 0], [1, 1, 1]]).bool()


@pytest.mark.parametrize(
    ("ratio", "expected"),
    [
        (0.4, [[0, 2.5, 0], [2.5, 0, 0]]),
        (0.2, [[0, 0, 0], [5, 0, 0]]),
        # A share of 2.05 tokens is 3 of them.
        (0.41, [[0, 5 / 3, 0], [5 / 3, 0, 5 / 3]]),
        (1.0, [[1, 1, 0], [1, 1, 1]]),
    ],
)
def test_the_tokens_of_highest_entropy_are_kept(ratio: float, expected: list[list[float]]):
    mini = loss_inputs([[0.0] * 3] * 2, MASK.long().tolist(), old_entropy=ENTROPY)
    torch.testing.assert_close(top_entropy_weights(mini, ratio)["weight"], torch.tensor(expected).float())
    with pytest.raises(ValueError, match=r"ratio=1.5: must be in \(0, 1\]"):
        top_entropy_weights(mini, 1.5)


def test_the_mean_over_all_tokens_is_that_over_the_kept():
    weights = {"weight": torch.tensor([[0, 2.5, 0], [2.5, 0, 0]])}
    advantages = torch.tensor([[1.0, 1.0, 1.0], [-2.0, -2.0, -2.0]])
    inputs = loss_inputs([[0.0] * 3] * 2, MASK.long().tolist(), advantages=advantages, prepared=weights)
    losses, metrics = top_entropy_loss(inputs)
    # Ratios are 1: the mean of -1 and 2.
    assert losses[MASK].mean().item() == pytest.approx(0.5) and metrics["top_entropy_kept"].item() == 2
    losses.sum().backward()
    torch.testing.assert_close(inputs.logprobs.grad, torch.tensor([[0, -2.5, 0], [5.0, 0, 0]]))
