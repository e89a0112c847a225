import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.algorithms.losses import ppo_clip_loss, token_mean
from verl.algorithms.losses.aggregate import sequence_mean, sequence_sum

PER_TOKEN = [[1.0, 2.0, math.nan], [4.0, math.inf, math.nan], [math.nan, math.nan, -math.inf], [3.0, 5.0, 7.0]]
MASK = [[1, 1, 0], [1, 0, 0], [0, 0, 0], [1, 1, 1]]


@pytest.mark.parametrize(
    ("aggregate", "expected", "gradient"),
    [
        # sum 22 over 4
        (token_mean, 5.5, [[0.25, 0.25, 0], [0.25, 0, 0], [0, 0, 0], [0.25, 0.25, 0.25]]),
        # means 1.5, 4, none, 5 over 4 responses
        (sequence_mean, 2.625, [[0.125, 0.125, 0], [0.25, 0, 0], [0, 0, 0], [1 / 12, 1 / 12, 1 / 12]]),
        # sums 3, 4, 0, 15 over 4 responses
        (sequence_sum, 5.5, [[0.25, 0.25, 0], [0.25, 0, 0], [0, 0, 0], [0.25, 0.25, 0.25]]),
        # ... and over 10 tokens each
        (
            lambda x, mask, count: sequence_sum(x, mask, count, 10),
            0.55,
            [[0.025, 0.025, 0], [0.025, 0, 0], [0, 0, 0], [0.025, 0.025, 0.025]],
        ),
    ],
    ids=["token_mean", "sequence_mean", "sequence_sum", "constant_length"],
)
@pytest.mark.parametrize("count", [4, torch.tensor(4.0)], ids=["number", "tensor"])
def test_literal_values_and_gradients(aggregate, expected, gradient, count):
    per_token = torch.tensor(PER_TOKEN, dtype=torch.float64, requires_grad=True)
    loss = aggregate(per_token, torch.tensor(MASK), count)
    loss.backward()
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    torch.testing.assert_close(per_token.grad, torch.tensor(gradient, dtype=torch.float64), rtol=1e-12, atol=0)


@given(
    st.integers(0, 2**31 - 1),
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=7, max_size=7),
    st.sampled_from(["token_mean", "sequence_mean", "sequence_sum", "constant_length"]),
)
@settings(max_examples=80, deadline=None)
def test_no_split_changes_value_or_gradient(seed, places, name):
    """``places[i]`` are the rank and the micro-batch of response i; each micro-batch is trimmed to its longest."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(7, 4, 3, generator=generator, dtype=torch.float64)
    old, advantages = torch.randn(2, 7, 4, generator=generator, dtype=torch.float64)
    lengths = torch.randint(0, 5, (7,), generator=generator)
    lengths[0] = 4
    mask = torch.arange(4) < lengths[:, None]
    start = torch.randn(3, generator=generator, dtype=torch.float64)

    def aggregate(per_token, mask_part):
        if name == "token_mean":
            return token_mean(per_token, mask_part, mask.sum())
        if name == "constant_length":
            return sequence_sum(per_token, mask_part, 7, 16)
        return {"sequence_mean": sequence_mean, "sequence_sum": sequence_sum}[name](per_token, mask_part, 7)

    def step(groups):
        weights = start.clone().requires_grad_()
        total = 0.0
        for rows in groups:
            width = int(lengths[rows].max())
            part = (old[rows, :width], advantages[rows, :width], mask[rows, :width])
            losses, _ = ppo_clip_loss(features[rows, :width] @ weights, *part, 0.2, 0.2)
            loss = aggregate(losses, part[-1])
            loss.backward()
            total += loss.item()
        return total, weights.grad

    value, gradient = step([list(range(7))])
    parts = [[i for i in range(7) if places[i] == place] for place in sorted(set(places))]
    split_value, split_gradient = step(parts)
    assert split_value == pytest.approx(value, rel=1e-9, abs=1e-12)
    torch.testing.assert_close(split_gradient, gradient, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("count", [0, -1.0, math.nan, torch.tensor(0)])
@pytest.mark.parametrize(
    ("aggregate", "message"),
    [
        (token_mean, "num_tokens="),
        (sequence_mean, "num_sequences="),
        (sequence_sum, "num_sequences="),
        (lambda x, mask, count: sequence_sum(x, mask, count, 4), "num_sequences="),
        (lambda x, mask, count: sequence_sum(x, mask, 1, count), "length="),
    ],
)
def test_counts_must_be_positive(aggregate, message, count):
    with pytest.raises(ValueError, match=message):
        aggregate(torch.ones(1, 1), torch.ones(1, 1), count)
