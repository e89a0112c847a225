"""A bounded buffer of responses, which comes back from a checkpoint to the bit."""

from dataclasses import replace

import pytest
import torch

from tests.kit import stored
from tests.method.batches import RECORDS, batch_of
from verl.config import ConfigError
from verl.method import ReplayBuffer


def restored(state, prompts=RECORDS) -> ReplayBuffer:
    again = ReplayBuffer(5, prompts)
    again.load_state_dict(stored(state))
    return again


def test_buffer_is_bounded_and_comes_back_to_the_bit():
    buffer = ReplayBuffer(5, RECORDS)
    assert len(restored(buffer.state_dict())) == 0
    buffer.add(batch_of([0.0, 0.0, 1.0, 0.0], uids=[0, 0, 1, 1], extras=[{"a": 1.0}] * 4))
    edited = replace(RECORDS[2], input_ids=[1, 9], messages=[{"role": "user", "content": "hint"}])
    second = batch_of([1.0, 0.0], lengths=[2, 3], uids=[2, 2], step=2)
    second.tokens[1] = 9
    buffer.add(second.fill(records=[edited, RECORDS[2]], texts=["\ud800\x00", "ü"]))
    # Six of two each: the oldest group falls out as a whole.
    assert len(buffer) == 4 and buffer.batch.step.tolist() == [1, 1, 2, 2]
    assert len(buffer.take([])) == 0
    assert buffer.take([0]).texts == ["text 2"] and buffer.batch.step.tolist() == [1, 2, 2]
    held, again = buffer.batch, restored(buffer.state_dict()).batch
    assert again.names == held.names and again.width == held.width
    assert again.records == held.records and again.records[1] == edited and again.records[2] is RECORDS[2]
    # What a reward function returned besides the score is not kept.
    assert (again.texts, again.verdicts) == (held.texts, held.verdicts) and not held.verdicts[0].extras
    tensors = [name for name in held.names if isinstance(getattr(held, name), torch.Tensor)]
    assert {"tokens", "rank/m", "mean_states"} <= set(tensors)
    for name in ("prompt_lengths", *tensors):
        before, after = getattr(held, name), getattr(again, name)
        assert torch.equal(before, after) and before.dtype == after.dtype
    with pytest.raises(ConfigError, match=r"^data.train_files: the checkpoint has responses to prompts"):
        restored(buffer.state_dict(), RECORDS[:2])
    # Other data of the same size, or another template, would be taken for what the responses answer.
    others = [replace(record, input_ids=[1, 99]) for record in RECORDS]
    with pytest.raises(ConfigError, match=r"^data.train_files: prompt 1 is not the one whose response the checkpoint"):
        restored(buffer.state_dict(), others)
    # Once it is empty, it is as a new one.
    buffer.take(torch.ones(3, dtype=torch.bool))
    assert len(buffer) == 0 and buffer.state_dict() == {}
    with pytest.raises(ValueError, match="the buffer is empty"):
        _ = buffer.batch
    with pytest.raises(ValueError, match="capacity=0: must be at least 1"):
        ReplayBuffer(0, RECORDS)
