"""Batches over real Ray workers: shares, copies, order."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from verl.protocol import ConversationBatch
from verl.single_controller import WorkerGroup, concat
from verl.single_controller.roles import RoleWorkers


@pytest.fixture(scope="module")
def workers(ray_session: None) -> Iterator[WorkerGroup]:
    group = WorkerGroup("echo:EchoWorker", None, (), 1, 4, "cpu", {"PYTHONPATH": str(Path(__file__).parent)})
    yield group
    group.close()


def batch_of(lengths: list[int]) -> ConversationBatch:
    """Rows of so many tokens; row i begins with token i."""
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    ids = torch.arange(len(lengths))[:, None].expand(mask.shape).contiguous()
    return ConversationBatch(ids, mask, mask, batch_size=[len(lengths)])


def test_neighbours_share_what_copies_says(workers):
    batch = batch_of([1, 2, 3, 4])
    rows, ranks = concat(workers.run_split("first_tokens", batch))
    assert (rows.tolist(), ranks.tolist()) == ([0, 1, 2, 3], [0, 1, 2, 3])
    rows, ranks = concat(workers.run_split("first_tokens", batch, copies=2))
    assert (rows.tolist(), ranks.tolist()) == ([0, 1, 2, 3], [0, 0, 2, 2])
    with pytest.raises(ValueError, match="first_tokens: a batch of 1 cannot be split over 2 workers"):
        workers.run_split("first_tokens", batch[:1], copies=2)


@pytest.mark.parametrize("balance", [False, True])
@pytest.mark.parametrize("copies", [1, 2, 4])
def test_rows_of_any_number_come_back_in_order(workers, balance: bool, copies: int):
    for size in (1, 3, 4, 7):
        batch = batch_of([1 + (5 * i) % 7 for i in range(size)])
        rows, ranks = RoleWorkers(workers, copies, balance).map_rows("first_tokens", batch)
        assert rows.tolist() == list(range(size))
        assert set(ranks.tolist()) <= {0, copies, 2 * copies, 3 * copies}


def test_an_update_balances_tokens(workers):
    batch = batch_of([8, 8, 8, 8, 1, 1, 1, 1])
    first = {"tokens": 32.0, "rank": 0.0}
    assert RoleWorkers(workers, balance=False).run_update("count_tokens", batch, 2) == first
    assert RoleWorkers(workers, balance=True).run_update("count_tokens", batch, 2) == first | {"tokens": 18.0}
    assert RoleWorkers(workers, 2, True).run_update("count_tokens", batch, 2) == first | {"tokens": 36.0}
    with pytest.raises(AssertionError, match="7 rows cannot be split evenly over 4"):
        RoleWorkers(workers, balance=False).run_update("count_tokens", batch[:7], 2)
