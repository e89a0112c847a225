import pytest
import torch

from verl.algorithms.scores import overlong_penalty, resampled_rows, resampling_weights

REWARDS = torch.tensor([-1.0, 0.0, 0.5, 2.0, 2.0])


@pytest.mark.parametrize(
    ("method", "power", "weights"),
    [
        ("pow", 2.0, [1.0, 0.0, 0.25, 4.0, 4.0]),
        ("pow", 1.0, [1.0, 0.0, 0.5, 2.0, 2.0]),
        ("max_min", 2.0, [1.0, 0.0, 0.0, 1.0, 1.0]),
        ("max_random", 2.0, [0.1, 0.1, 0.1, 0.4, 0.4]),
    ],
)
def test_weights(method: str, power: float, weights: list[float]):
    expected = torch.tensor(weights, dtype=torch.float64) + 1e-8
    torch.testing.assert_close(resampling_weights(REWARDS, method, power), expected, rtol=1e-6, atol=0)


def test_responses_are_drawn_by_their_weights_and_the_same_again():
    rewards = REWARDS.repeat(2000)
    rows, again = (
        resampled_rows(rewards, rewards > -2, "pow", 2.0, torch.Generator().manual_seed(3)) for _ in range(2)
    )
    assert torch.equal(rows, again) and rows.shape == (10000,)
    drawn = (rows % 5).bincount(minlength=5) / 10000
    # A share's standard deviation is at most 0.005.
    torch.testing.assert_close(drawn, torch.tensor([4.0, 0.0, 1.0, 16.0, 16.0]) / 37, rtol=0, atol=0.02)


def test_zero_rewards_are_drawn_evenly():
    nothing, generator = torch.zeros(1000), torch.Generator().manual_seed(0)
    assert resampled_rows(nothing, torch.ones(1000), "pow", 2.0, generator).unique().numel() > 550
    assert resampled_rows(REWARDS, REWARDS > 9, "pow", 2.0, generator).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("lengths", "longest", "buffer", "factor", "expected"),
    [
        # Nothing up to the buffer, then linear to the full penalty, and no further.
        ([0, 50, 80, 81, 90, 100, 110], 100, 20, 0.5, [0.0, 0.0, 0.0, -0.025, -0.25, -0.5, -0.5]),
        # DAPO: L_max = 20480 with a cache of 4096 tokens.
        ([16384, 18432, 20480], 20480, 4096, 1.0, [0.0, -0.5, -1.0]),
    ],
)
def test_literal_penalties(lengths, longest, buffer, factor, expected):
    penalty = overlong_penalty(torch.tensor(lengths), longest, buffer, factor)
    assert penalty.tolist() == expected and penalty.dtype == torch.float64
