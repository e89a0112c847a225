"""Batches over real Ray workers: shares, copies, order."""

import ast
from pathlib import Path

import pytest
import torch

from verl.batch import Batch
from verl.single_controller import roles
from verl.single_controller.roles import RoleWorkers
from verl.workers.hybrid import HybridWorker
from verl.workers.sft import SFTWorker


def batch_of(lengths: list[int]) -> Batch:
    """Texts of so many tokens; row i begins with token i."""
    tokens = [[row] * length for row, length in enumerate(lengths)]
    return Batch.of([[]] * len(lengths), tokens, learn_mask=torch.ones(sum(lengths), dtype=torch.bool))


def test_neighbours_share_what_copies_says(workers):
    batch = batch_of([1, 2, 3, 4])
    for copies, ranks in ((1, [0, 1, 2, 3]), (2, [0, 0, 2, 2])):
        found = Batch.join(workers.run_split("note_rank", batch, copies=copies))
        assert (found.first_token.tolist(), found.rank.tolist()) == ([0, 1, 2, 3], ranks)
    with pytest.raises(ValueError, match="note_rank: a batch of 1 cannot be split over 2 workers"):
        workers.run_split("note_rank", batch[:1], copies=2)


@pytest.mark.parametrize("balance", [False, True])
@pytest.mark.parametrize("copies", [1, 2, 4])
def test_rows_of_any_number_come_back_in_order(workers, balance: bool, copies: int):
    for size in (1, 3, 4, 7):
        batch = batch_of([1 + (5 * i) % 7 for i in range(size)])
        found = RoleWorkers(workers, copies, balance).map_rows("note_rank", batch)
        assert found.first_token.tolist() == list(range(size))
        assert found.response_lengths.equal(batch.response_lengths)
        assert set(found.rank.tolist()) <= {0, copies, 2 * copies, 3 * copies}


def test_an_update_balances_tokens(workers):
    batch = batch_of([8, 8, 8, 8, 1, 1, 1, 1])
    first = {"tokens": 32.0, "rank": 0.0}
    assert RoleWorkers(workers, balance=False).run_update("count_tokens", batch, 2) == first
    assert RoleWorkers(workers, balance=True).run_update("count_tokens", batch, 2) == first | {"tokens": 18.0}
    assert RoleWorkers(workers, 2, True).run_update("count_tokens", batch, 2) == first | {"tokens": 36.0}


@pytest.mark.parametrize("balance", [False, True])
@pytest.mark.parametrize(("copies", "sizes"), [(1, {1: 1, 3: 1, 5: 2, 8: 2}), (2, {1: 1, 3: 2, 5: 3, 8: 4})])
def test_an_update_learns_from_each_row_once(workers, balance: bool, copies: int, sizes: dict[int, int]):
    for size, in_share in sizes.items():
        batch = batch_of([2 + (5 * i) % 7 for i in range(size)])
        RoleWorkers(workers, copies, balance).run_update("count_tokens", batch, 1)
        shares = workers.run("learned")
        assert [rows for rows, _ in shares] == [in_share] * 4
        assert shares[::copies] == shares[copies - 1 :: copies]
        assert sorted(row for _, rows in shares[::copies] for row in rows) == list(range(size))
        assert batch.learn_mask.all()


@pytest.mark.parametrize(("balance", "copies"), [(False, 1), (True, 1), (True, 2)])
def test_an_update_returns_what_it_finds_of_each_row(workers, balance: bool, copies: int):
    for size in (1, 5, 8):
        batch = batch_of([2 + (5 * i) % 7 for i in range(size)])
        role = RoleWorkers(workers, copies, balance)
        metrics, rows = role.run_scoring_update("count_and_return_tokens", batch, 1)
        assert metrics == role.run_update("count_tokens", batch, 1)
        assert torch.equal(rows.tokens, batch.tokens)
        assert sorted(row for _, found in workers.run("learned")[::copies] for row in found) == list(range(size))


CALLS = {"run", "run_split", "map_rows", "run_update", "run_scoring_update"}
"""Calls whose first argument names a method of the worker."""


def test_workers_have_the_methods_that_roles_call():
    called: dict[str, set[str]] = {}
    for cls in ast.parse(Path(roles.__file__).read_text()).body:
        if isinstance(cls, ast.ClassDef) and cls.name != "RoleWorkers":
            calls = [node for node in ast.walk(cls) if isinstance(node, ast.Call)]
            by_name = [call for call in calls if getattr(call.func, "attr", "") in CALLS]
            called[cls.name] = {ast.literal_eval(call.args[0]) for call in by_name}
    assert len(called) == 5 and all(called.values())
    for role, names in called.items():
        worker = SFTWorker if role == "SFTWorkers" else HybridWorker
        assert not [name for name in names if not callable(getattr(worker, name, None))], role
