"""Rows shared out by their tokens."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from verl.single_controller.balance import balanced_order


def test_the_longest_are_dealt_out_first():
    # 9 | 7, then 5 joins 7, 4 joins 9: 13 against 12; 2 joins 12, 1 what has room.
    lengths = torch.tensor([1, 2, 4, 5, 7, 9])
    assert balanced_order(lengths, 2).tolist() == [5, 2, 0, 4, 3, 1]
    assert balanced_order(lengths, 1).tolist() == [5, 4, 3, 2, 1, 0]


@given(lengths=st.lists(st.integers(1, 1000), min_size=8, max_size=40), shares=st.integers(1, 8))
def test_shares_are_as_equal_as_one_row_allows(lengths: list[int], shares: int):
    size = len(lengths)
    order = balanced_order(torch.tensor(lengths), shares)
    assert sorted(order.tolist()) == list(range(size))
    bounds = [size * share // shares for share in range(shares + 1)]
    if size % shares == 0:
        totals = [sum(lengths[row] for row in order[a:b].tolist()) for a, b in zip(bounds, bounds[1:], strict=False)]
        assert max(totals) - min(totals) <= max(lengths)
