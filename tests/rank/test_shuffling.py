"""Signals of hidden states, given to other responses to the same prompt."""

import numpy as np
import pytest
import torch

from tests.kit import rank_columns
from tests.method.batches import batch_of
from verl.batch import Batch
from verl.rank.shuffling import shuffle_within_groups

GROUPS = [5, 3, 3, 5, 5, 3, 7, 5]


def numbered() -> Batch:
    """Responses to three prompts, mixed; all columns of response i say i."""
    numbers = torch.arange(8).double()
    states = numbers[:, None, None].expand(8, 1, 3).float()
    return batch_of(range(8), uids=GROUPS, **rank_columns({"m": numbers, "n": 10 * numbers}, mean_states=states))


@pytest.mark.parametrize(("seed", "step"), [(0, 1), (0, 2), (7, 1)])
def test_signals_move_within_groups(seed: int, step: int):
    batch = numbered()
    shuffle_within_groups(batch, seed, step)
    expected = [-1] * 8
    order = np.random.default_rng([seed, step]).permutation(8).tolist()
    for group in set(GROUPS):
        places = [i for i in range(8) if GROUPS[i] == group]
        for place, source in zip(places, [i for i in order if GROUPS[i] == group], strict=True):
            expected[place] = source
    assert batch.rank_metrics["m"].flatten().tolist() == expected
    assert batch.rank_metrics["n"].flatten().tolist() == [10 * i for i in expected]
    assert batch.mean_states[:, 0, 0].tolist() == expected
    # Everything else stays.
    assert batch.scores.tolist() == [*range(8)] and batch.texts == numbered().texts


def test_permutations_differ_by_seed_and_step():
    found = set()
    for seed in range(4):
        for step in range(1, 4):
            batch = numbered()
            shuffle_within_groups(batch, seed, step)
            found.add(tuple(batch.rank_metrics["m"].flatten().tolist()))
    assert len(found) > 8


def test_named_columns_are_not_shuffled():
    batch = numbered()
    shuffle_within_groups(batch, 0, 1, except_for=["rank/m", "mean_states"])
    assert batch.rank_metrics["m"].flatten().tolist() == [*range(8)]
    assert batch.mean_states[:, 0, 0].tolist() == [*range(8)]
    assert batch.rank_metrics["n"].flatten().tolist() != [10 * i for i in range(8)]
