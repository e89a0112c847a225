"""PACS against numbers worked out by hand."""

import math

import pytest
import torch

from tests.recipes.loss_inputs import loss_inputs
from verl.recipes.pacs import pacs_loss


def softplus(x: float) -> float:
    return math.log1p(math.exp(x))


# Two prompts, their responses mixed: rewards 1, 0, -2 of the first, of which one is correct; 3 and 1, both correct.
LOGPROBS = [[0.5, 0.5], [2.0, 1.0], [0.0, 0.0], [-1.0, -1.0], [1.0, 9.0]]
MASK = [[1, 1], [1, 1], [1, 1], [1, 1], [1, 0]]
GROUPS = {"group_ids": torch.tensor([7, 3, 7, 7, 3]), "correct": torch.tensor([True, True, False, False, True])}


@pytest.mark.parametrize(("balanced", "weights"), [(True, [1.5, 1.0, 0.75, 0.75, 1.0]), (False, [1.0] * 5)])
def test_the_cross_entropy_of_each_response(balanced: bool, weights: list[float]):
    inputs = loss_inputs(LOGPROBS, MASK, **GROUPS)
    losses, metrics = pacs_loss(inputs, balanced=balanced)
    # Each reward less the mean of the others: 1 - (-1), 0 - (-0.5), -2 - 0.5; 3 - 1, 1 - 3.
    plain = [softplus(-2.0), softplus(-2.0), softplus(0.5), softplus(-2.5), softplus(2.0)]
    expected = torch.tensor([loss * weight for loss, weight in zip(plain, weights, strict=True)])
    torch.testing.assert_close(losses, expected)
    assert metrics["pacs_reward"].tolist() == [1.0, 3.0, 0.0, -2.0, 1.0]
    assert metrics["pacs_agrees"].tolist() == [1.0, 1.0, 0.0, 1.0, 0.0]


def test_a_response_without_tokens_is_not_in_its_group():
    # The third response, of the first prompt, is rejected: the other two have one label each.
    inputs = loss_inputs(LOGPROBS, [[1, 1], [1, 1], [0, 0], [1, 1], [1, 0]], **GROUPS)
    losses, _ = pacs_loss(inputs, beta=0.5)
    # Rewards 0.5 and -1.
    torch.testing.assert_close(losses[[0, 3]], torch.tensor([softplus(-1.5), softplus(-1.5)]))
    losses[[0, 1, 3, 4]].sum().backward()
    assert inputs.logprobs.grad.isfinite().all() and not inputs.logprobs.grad[2].any()
