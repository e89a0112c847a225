"""Micro-batches by rows and by tokens."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl.batch import Batch
from verl.models.micro_batches import MicroBatching, RowTokens, join_parts, split_by_tokens, split_to_count


def cut_by_tokens(
    prompts: list[int], responses: list[int], max_tokens: int, packed: bool, size: int = 1
) -> list[list[int]]:
    """The rows of each part, of units of ``size`` neighbours."""
    units = [list(range(first, first + size)) for first in range(0, len(prompts), size)]
    rows = RowTokens(prompts, responses, packed)
    parts = split_by_tokens(sorted(units, key=rows.sort_key), max_tokens, rows.count)
    return [[row for unit in part for row in unit] for part in parts]


def test_packed_rows_count_tokens_and_padded_ones_the_longest():
    prompts, responses = [4, 1, 2, 1], [6, 5, 2, 1]  # 10, 6, 4, 2 tokens
    assert cut_by_tokens(prompts, responses, 12, packed=True) == [[0], [1, 2, 3]]
    # Rows 1 and 2 take 2 * (2 + 5) when padded.
    assert cut_by_tokens(prompts, responses, 12, packed=False) == [[0], [1], [2, 3]]
    assert cut_by_tokens(prompts, responses, 14, packed=False) == [[0], [1, 2], [3]]
    assert cut_by_tokens(prompts, responses, 1, packed=True) == [[0], [1], [2], [3]]


@given(
    lengths=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 90)), min_size=1, max_size=10),
    size=st.integers(1, 3),
    max_tokens=st.integers(1, 400),
    packed=st.booleans(),
)
def test_every_unit_is_cut_once_and_within_the_bound(lengths, size: int, max_tokens: int, packed: bool):
    prompts, responses = ([pair[i] for pair in lengths for _ in range(size)] for i in (0, 1))
    parts = cut_by_tokens(prompts, responses, max_tokens, packed, size)
    assert sorted(row for rows in parts for row in rows) == list(range(size * len(lengths)))
    for rows in parts:
        assert all(set(range(row - row % size, row - row % size + size)) <= set(rows) for row in rows)
        total = sum(prompts[i] + responses[i] for i in rows)
        padded = len(rows) * (max(prompts[i] for i in rows) + max(responses[i] for i in rows))
        assert (total if packed else padded) <= max_tokens or len(rows) == size


def test_further_parts_are_split_from_the_largest():
    a, b, c, d, e, f = ([row] for row in range(6))
    assert split_to_count([[a], [b, c, d], [e, f]], 3) == [[a], [b, c, d], [e, f]]
    assert split_to_count([[a], [b, c, d], [e, f]], 5) == [[a], [b], [c], [d], [e, f]]
    # Whatever is in them, units are not cut.
    assert split_to_count([[[0, 1, 2], [3]], [[4, 5]]], 3) == [[[0, 1, 2]], [[3]], [[4, 5]]]
    with pytest.raises(AssertionError, match="4 micro-batches of 3 units"):
        split_to_count([[a, b, c]], 4)


def test_shared_prompt_counts_once_and_groups_its_responses(single_mesh):
    a, b = [7] * 10, [8] * 10
    batch = Batch.of([a, b, a, b, b], [[1] * 3, [1] * 2, [1] * 4, [1] * 2, [1] * 9])
    by_tokens = MicroBatching(1, max_tokens=30, packed=True, shares_prompts=True)
    # 10 + 3 + 4 tokens, 29 with the second prompt and a response to it, 31 with two, and 1 for 20 keys that are there
    # twice; the rest has that prompt again.
    assert [rows.tolist() for rows in by_tokens.cut(batch)] == [[0, 2, 1], [3, 4]]
    assert [rows.tolist() for rows in replace(by_tokens, max_tokens=32).cut(batch)] == [[0, 2, 1, 3], [4]]
    # Whole, the rows of one micro-batch are at most two.
    assert [len(rows) for rows in replace(by_tokens, shares_prompts=False).cut(batch)] == [1, 2, 2]
    # Too little is saved for the layout to share it: the whole rows count.
    long = Batch.of([[7]] * 2, [[1] * 30] * 2)
    assert [rows.tolist() for rows in replace(by_tokens, max_tokens=61).cut(long)] == [[0], [1]]


UNITS = [7, 3, 7, 3, 5, 5]


@pytest.mark.parametrize(
    ("units", "rows", "expected"),
    [
        (None, 1, [[0], [1], [2], [3], [4], [5]]),
        # Rows need not divide the share of a worker.
        (None, 4, [[0, 1, 2, 3], [4, 5]]),
        (None, 8, [[0, 1, 2, 3, 4, 5]]),
        (UNITS, 1, [[0, 2], [1, 3], [4, 5]]),
        (UNITS, 3, [[0, 2], [1, 3], [4, 5]]),
        (UNITS, 5, [[0, 2, 1, 3], [4, 5]]),
    ],
)
def test_rows_of_a_unit_share_a_micro_batch(units, rows: int, expected: list[list[int]]):
    batch = Batch.of([[1]] * 6, [[1]] * 6)
    cuts = MicroBatching(rows, max_tokens=None, packed=False).cut(batch, None if units is None else torch.tensor(units))
    assert [cut.tolist() for cut in cuts] == expected


def test_results_keep_the_order_of_rows(single_mesh):
    batch = Batch.of([[1], [1, 1], [1], [1]], [[10], [11, 12, 13], [14, 15], [16]])
    by_rows = MicroBatching(rows=3, max_tokens=None, packed=False).cut(batch)
    assert [rows.tolist() for rows in by_rows] == [[0, 1, 2], [3]]
    by_tokens = MicroBatching(rows=3, max_tokens=6, packed=False).cut(batch)
    assert [rows.tolist() for rows in by_tokens] == [[1], [2, 0], [3]]
    joined = join_parts([batch[rows].trimmed() for rows in by_tokens], by_tokens, width=5)
    assert joined.response_tokens.tolist() == list(range(10, 17)) and joined.width == 5
