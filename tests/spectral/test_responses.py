"""Chunks of clean float64 rows."""

import math

import pytest
import torch

from verl.spectral.responses import chunks, largest_entries


def random_hidden(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def split(hidden, lengths, limit, on_nonfinite="raise"):
    largest = largest_entries(hidden, lengths, on_nonfinite)
    return list(chunks(hidden, lengths, largest, lambda rows: 8 * rows, limit))


def test_chunks_cover_the_batch_within_the_limit():
    hidden, lengths = random_hidden(0, 7, 10, 4), torch.tensor([3, 10, 0, 1, 10, 7, 2])
    parts = split(hidden, lengths, limit=2 * 8 * 10)
    # Two responses of 10 rows fit; later chunks are shorter and hold more. The response without rows is left out.
    assert [part.which.tolist() for part in parts] == [[1, 4], [5, 0], [6, 3]]
    assert [part.longest for part in parts] == [10, 7, 2]
    for part in parts:
        assert torch.equal(part.lengths, lengths[part.which])
    # A limit below one response gives one at a time.
    assert [part.which.tolist() for part in split(hidden[:2], lengths[:2], limit=1)] == [[1], [0]]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_nonfinite_rows_raise_or_are_masked(bad, dtype):
    hidden, lengths = random_hidden(0, 4, 5, 3).to(dtype), torch.tensor([2, 5, 4, 3])
    hidden[2, 3, 1] = bad
    hidden[3, 3:] = bad
    with pytest.raises(ValueError, match="response 2: .*NaN or infinity.*on_nonfinite=mask"):
        largest_entries(hidden, lengths, "raise")
    assert largest_entries(hidden, lengths, "mask").isnan().tolist() == [False, False, True, False]
    parts = split(hidden, lengths, limit=10**6, on_nonfinite="mask")
    assert [part.which.tolist() for part in parts] == [[1, 3, 0]]


@pytest.mark.parametrize("scale", [1e-300, 1e300, 3e307])
def test_extreme_scales_stay_in_range(scale):
    hidden, lengths = random_hidden(0, 1, 6, 4).double(), torch.tensor([6])
    (part,), (scaled,) = split(hidden, lengths, 10**6), split(hidden * scale, lengths, 10**6)
    torch.testing.assert_close(scaled.rows(0, 6) * (scaled.scale / scale), part.rows(0, 6) * part.scale)
