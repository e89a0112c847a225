"""Batches over real Ray workers: shares, copies, order."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl.batch import Batch
from verl.single_controller.roles import ModelWorkers, balanced_order, deal_groups, dealt_by_teacher


def batch_of(lengths: list[int]) -> Batch:
    """Texts of so many tokens; row i begins with token i."""
    tokens = [[row] * length for row, length in enumerate(lengths)]
    return Batch.of([[]] * len(lengths), tokens, learn_mask=torch.ones(sum(lengths), dtype=torch.bool))


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


def test_groups_are_dealt_whole_and_filled_up_to_one_size():
    # Groups 4 (rows 0, 2, 5), 1 (rows 1, 3) and 8 (row 4), of 9, 11 and 1 tokens, in two shares.
    ids, lengths = torch.tensor([4, 1, 4, 1, 8, 4]), torch.tensor([3, 5, 2, 6, 1, 4])
    rows, copied, unit = deal_groups(ids, lengths, 2, balance=False)
    assert rows.tolist() == [0, 2, 5, 1, 3, 1, 4, 4, 4, 4, 4, 4]
    assert copied.tolist() == [False] * 5 + [True, False] + [True] * 5
    assert unit.tolist() == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3
    balanced, *_ = deal_groups(ids, lengths, 2, balance=True)
    # 16 and 3 tokens with the copies, against 9 and 3.
    assert [balanced[share].tolist() for share in (slice(6), slice(6, None))] == [
        [1, 3, 1, 4, 4, 4],
        [0, 2, 5, 4, 4, 4],
    ]


@given(
    groups=st.lists(st.integers(0, 5), min_size=1, max_size=30),
    shares=st.integers(1, 5),
    balance=st.booleans(),
)
def test_every_row_of_a_group_is_in_one_share_once(groups: list[int], shares: int, balance: bool):
    lengths = torch.arange(len(groups)) % 7 + 1
    rows, copied, unit = deal_groups(torch.tensor(groups), lengths, shares, balance)
    assert len(rows) % shares == 0 and sorted(rows[~copied].tolist()) == list(range(len(groups)))
    per_share = len(rows) // shares
    for group in set(groups):
        places = [i for i, (row, copy) in enumerate(zip(rows, copied, strict=True))
                  if not copy and groups[int(row)] == group]  # fmt: skip
        assert len({i // per_share for i in places}) == 1 and len(set(unit[places].tolist())) == 1


def test_neighbours_share_what_copies_says(workers):
    batch = batch_of([1, 2, 3, 4])
    for copies, ranks in ((1, [0, 1, 2, 3]), (2, [0, 0, 2, 2])):
        found = Batch.join(workers.run_split("note_rank", batch, ranks_per_share=copies))
        assert (found.first_token.tolist(), found.rank.tolist()) == ([0, 1, 2, 3], ranks)
    with pytest.raises(ValueError, match="note_rank: a batch of 1 cannot be split over 2 workers"):
        workers.run_split("note_rank", batch[:1], ranks_per_share=2)


@pytest.mark.parametrize("balance", [False, True])
@pytest.mark.parametrize("copies", [1, 2, 4])
def test_rows_of_any_number_come_back_in_order(workers, balance: bool, copies: int):
    for size in (1, 3, 4, 7):
        batch = batch_of([1 + (5 * i) % 7 for i in range(size)])
        found = ModelWorkers(workers, copies, balance).map_rows("note_rank", batch)
        assert found.first_token.tolist() == list(range(size))
        assert found.response_lengths.equal(batch.response_lengths)
        assert set(found.rank.tolist()) <= {0, copies, 2 * copies, 3 * copies}


@pytest.mark.parametrize(
    ("prompts", "lengths", "order"),
    [
        # Whole prompts of 4, 16, 6 and 2 tokens: the longest with the shortest.
        ([0, 0, 1, 1, 2, 2, 3, 3], [1, 3, 8, 8, 5, 1, 1, 1], [2, 3, 6, 7, 4, 5, 0, 1]),
        # One row a prompt, and prompts of which one has more: rows.
        ([0, 1, 2, 3], [1, 9, 3, 8], [1, 0, 3, 2]),
        ([0, 0, 0, 1], [1, 9, 3, 8], [1, 0, 3, 2]),
    ],
)
def test_prompts_are_dealt_whole_where_workers_get_as_many(prompts: list[int], lengths: list[int], order: list[int]):
    group: Any = SimpleNamespace(world_size=2)
    batch = Batch.of([[prompt] for prompt in prompts], [[9] * (length - 1) for length in lengths])
    rows, copied = ModelWorkers(group, balance=True, whole_prompts=True)._shares(batch)
    assert rows.tolist() == order and not copied.any()


def test_an_update_balances_tokens(workers):
    batch = batch_of([8, 8, 8, 8, 1, 1, 1, 1])
    first = {"tokens": 32.0, "rank": 0.0}
    assert ModelWorkers(workers, balance=False).run_update("count_tokens", batch, 2) == first
    assert ModelWorkers(workers, balance=True).run_update("count_tokens", batch, 2) == first | {"tokens": 18.0}
    assert ModelWorkers(workers, 2, True).run_update("count_tokens", batch, 2) == first | {"tokens": 36.0}


@pytest.mark.parametrize("balance", [False, True])
@pytest.mark.parametrize(("copies", "sizes"), [(1, {1: 1, 3: 1, 5: 2, 8: 2}), (2, {1: 1, 3: 2, 5: 3, 8: 4})])
def test_an_update_learns_from_each_row_once(workers, balance: bool, copies: int, sizes: dict[int, int]):
    for size, in_share in sizes.items():
        batch = batch_of([2 + (5 * i) % 7 for i in range(size)])
        role = ModelWorkers(workers, copies, balance)
        metrics, rows = role.run_scoring_update("count_and_return_tokens", batch, 1)
        assert torch.equal(rows.tokens, batch.tokens)
        assert metrics == role.run_update("count_tokens", batch, 1)
        shares = workers.run("learned")
        assert [rows for rows, _ in shares] == [in_share] * 4
        assert shares[::copies] == shares[copies - 1 :: copies]
        assert sorted(row for _, rows in shares[::copies] for row in rows) == list(range(size))
        assert batch.learn_mask.all()


def test_shares_have_equally_many_rows_of_each_teacher():
    batch = Batch.of([[1]] * 5, [[2] * n for n in (3, 1, 2, 4, 5)]).fill(teacher=torch.tensor([0, 1, 0, 0, 1]))
    order, copied = ModelWorkers(SimpleNamespace(world_size=2))._shares(batch)
    # Three rows of the first teacher and a copy of its shortest, then two of the second.
    assert order.tolist() == [0, 2, 1, 3, 2, 4] and copied.int().tolist() == [0, 0, 0, 0, 1, 0]
    alone = batch.columns("tokens")
    assert dealt_by_teacher(alone, 2, lambda rows: (rows.lengths,))[0].equal(alone.lengths)
