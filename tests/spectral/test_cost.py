"""Which method ``auto`` takes."""

import pytest
import torch

from verl.spectral.bounds import block_rows, factor_operations
from verl.spectral.cost import cheapest_method


def choose(length, width, prefixes, batch=1):
    return cheapest_method(torch.full((batch,), length), torch.tensor([prefixes] * batch), width, 22)


def test_many_prefixes_are_factored_and_one_is_decomposed():
    assert choose(512, 896, list(range(41, 512, 40))) == "nested"
    assert choose(512, 896, list(range(2, 513))) == "nested"
    assert choose(512, 896, [512]) == "eigh"
    assert choose(2048, 16, [2048]) == "eigh"


def test_nothing_to_do_is_no_error():
    assert choose(1, 8, [1, 0]) in ("nested", "eigh")
    assert cheapest_method(torch.zeros(0, dtype=torch.int64), torch.zeros(0, 3).long(), 8, 22) in ("nested", "eigh")


def test_long_responses_are_cut_into_blocks_of_the_width():
    assert block_rows(512, 896) == 512
    assert block_rows(100, 64) == 100
    assert block_rows(4096, 64) == 64
    assert block_rows(3, 1) in (1, 3)


@pytest.mark.parametrize("width", [16, 64])
def test_the_operations_of_long_responses_grow_linearly(width):
    one, two = (factor_operations(rows, width, block_rows(rows, width)) for rows in (64 * width, 128 * width))
    assert two / one == pytest.approx(2.0)
