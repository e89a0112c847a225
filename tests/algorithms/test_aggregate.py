import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.algorithms.losses import ppo_clip_loss, token_mean


def test_literal_mean():
    per_token = torch.tensor([[1.0, 2.0, math.nan], [4.0, math.inf, math.nan]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    assert token_mean(per_token, mask, 14.0).item() == 0.5
    assert token_mean(per_token, mask, torch.tensor(7)).item() == 1.0


@pytest.mark.parametrize("count", [0, -1.0, math.nan, torch.tensor(0)])
def test_token_count_must_be_positive(count):
    with pytest.raises(ValueError, match="num_tokens"):
        token_mean(torch.ones(1, 1), torch.ones(1, 1), count)


@given(st.integers(0, 2**31 - 1), st.integers(1, 7))
@settings(max_examples=30, deadline=None)
def test_gradient_does_not_depend_on_the_split_into_micro_batches(seed, size):
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(7, 4, 3, generator=generator, dtype=torch.float64)
    old, advantages = torch.randn(2, 7, 4, generator=generator, dtype=torch.float64)
    mask = torch.arange(4) < torch.randint(1, 5, (7, 1), generator=generator)
    start = torch.randn(3, generator=generator, dtype=torch.float64)

    def gradient(micro_batch_size):
        weights = start.clone().requires_grad_()
        for i in torch.arange(7).split(micro_batch_size):
            losses, _ = ppo_clip_loss(features[i] @ weights, old[i], advantages[i], mask[i], 0.2, 0.2)
            token_mean(losses, mask[i], mask.sum()).backward()
        return weights.grad

    torch.testing.assert_close(gradient(size), gradient(7), rtol=1e-9, atol=1e-12)
