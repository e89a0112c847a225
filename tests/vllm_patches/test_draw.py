"""Drawing by inversion against probabilities in float64."""

from collections import Counter

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_patches.draw import BLOCK, draw


def evenly(count: int) -> Tensor:
    return (torch.arange(count, dtype=torch.float64) + 0.5) / count


def test_shares_are_exact_and_what_is_impossible_is_never_drawn():
    weights = torch.tensor([0.0, 0.125, 0.5, 0.0, 0.375, 0.0])
    assert Counter(draw(weights.expand(800, -1), evenly(800)).tolist()) == {1: 100, 2: 400, 4: 300}
    # In any scale, and split over blocks, the last of which is short.
    spread = torch.zeros(5 * BLOCK + 3)
    spread[torch.tensor([0, BLOCK - 1, 3 * BLOCK, 5 * BLOCK + 2])] = torch.tensor([2.0, 8.0, 4.0, 2.0])
    expected = {0: 100, BLOCK - 1: 400, 3 * BLOCK: 200, 5 * BLOCK + 2: 100}
    assert Counter(draw(spread.expand(800, -1), evenly(800)).tolist()) == expected


@pytest.mark.parametrize("vocab_size", [1, 100, BLOCK, 3 * BLOCK, 151_936, 151_936 + 7])
def test_both_ends_of_the_unit_interval(vocab_size: int):
    torch.manual_seed(0)
    weights = torch.rand(vocab_size) + 1e-3
    weights[: vocab_size // 3] = weights[vocab_size - vocab_size // 4 :] = 0
    (possible,) = weights.nonzero(as_tuple=True)
    ends = torch.tensor([0.0, 2**-53, 1 - 2**-53], dtype=torch.float64)
    first, second, last = draw(weights.expand(3, -1), ends).tolist()
    assert (first, second, last) == (possible[0], possible[0], possible[-1])
    # A single token that has all of the mass.
    alone = torch.zeros(vocab_size)
    alone[vocab_size // 2] = 1e-30
    assert draw(alone.expand(3, -1), ends).tolist() == [vocab_size // 2] * 3


def test_the_middle_of_every_share_draws_its_token():
    """Of a whole vocabulary, with probabilities over 12 orders of magnitude."""
    torch.manual_seed(0)
    logits = torch.randn(151_936, dtype=torch.float64) * 4
    weights = (logits - logits.max()).exp().float()
    exact = weights.double() / weights.double().sum()
    middles = exact.cumsum(0) - exact / 2
    chosen = torch.cat([torch.arange(0, 151_936, 1000), exact.topk(100).indices])
    # Sums of blocks are in float32: shares narrower than their error may be missed by one token.
    wide = chosen[exact[chosen] > 1e-6]
    assert len(wide) > 100
    assert torch.equal(draw(weights.expand(len(wide), -1), middles[wide]), wide)


def test_a_draw_does_not_depend_on_other_rows():
    torch.manual_seed(0)
    weights, numbers = (torch.randn(64, 5003) * 3).exp(), torch.rand(64, dtype=torch.float64)
    together = draw(weights, numbers)
    alone = [int(draw(weights[row : row + 1], numbers[row : row + 1])) for row in range(64)]
    assert together.tolist() == alone
    # Neither on where the rows lie: vLLM cuts them from wider ones.
    assert torch.equal(draw(torch.cat([weights, weights], dim=1)[:, :5003], numbers), together)


def test_a_row_without_a_distribution_draws_some_token():
    weights = torch.full((3, 300), torch.nan)
    weights[1] = 0
    weights[2, :299] = 1
    assert all(0 <= token < 300 for token in draw(weights, evenly(3)).tolist())


class Counting(TorchDispatchMode):
    """Counts operations."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


def test_draw_operations_are_independent_of_rows():
    counts = []
    for rows in (1, 7, 256):
        with Counting() as counting:
            draw(torch.rand(rows, 1000), evenly(rows))
        counts.append(counting.count)
    assert counts[0] == counts[1] == counts[2] < 60
