"""Leaving a loader at any of its positions and going on in another process."""

import json
import warnings
from itertools import islice

import pytest
import torch
from torch.utils.data import RandomSampler, SequentialSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from verl.data.dataloader import ResumableRandomSampler, whole_batches
from verl.trainer.schedule import endless
from verl.utils.json_state import from_json, to_json

NUM_STEPS = 11


def make_loader(num_examples: int, shuffle: bool) -> StatefulDataLoader:
    data = list(range(num_examples))
    generator = torch.Generator().manual_seed(3)
    sampler = ResumableRandomSampler(data, generator=generator) if shuffle else SequentialSampler(data)
    return whole_batches(data, 4, sampler, list)


def test_a_loader_is_made_without_a_word():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert list(make_loader(10, shuffle=False)) == [[0, 1, 2, 3], [4, 5, 6, 7]]


# One, two and three batches an epoch; with 10 examples, two are left out of each.
@pytest.mark.parametrize("num_examples", [4, 8, 10, 12])
@pytest.mark.parametrize("shuffle", [True, False])
def test_every_position_of_several_epochs(num_examples: int, shuffle: bool):
    whole = list(islice(endless(make_loader(num_examples, shuffle)), NUM_STEPS))
    per_epoch = num_examples // 4
    assert shuffle == (whole[:per_epoch] != whole[per_epoch : 2 * per_epoch])
    for position in range(NUM_STEPS):
        loader = make_loader(num_examples, shuffle)
        batches = endless(loader)
        assert list(islice(batches, position)) == whole[:position]
        state = json.dumps(to_json(loader.state_dict()))
        # Asking for the state moves nothing.
        assert list(islice(batches, NUM_STEPS - position)) == whole[position:]

        resumed = make_loader(num_examples, shuffle)
        resumed.load_state_dict(from_json(json.loads(state)))
        assert list(islice(endless(resumed), NUM_STEPS - position)) == whole[position:], position


def test_the_order_is_that_of_torchs_sampler():
    ours, torchs = (
        [list(sampler) for _ in range(3)]
        for sampler in (
            kind(range(10), generator=torch.Generator().manual_seed(5))
            for kind in (ResumableRandomSampler, RandomSampler)
        )
    )
    assert ours == torchs and ours[0] != ours[1]
