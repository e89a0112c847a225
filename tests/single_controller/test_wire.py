"""Batches in transit: every bit arrives, in few bytes."""

import pickle

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from verl.protocol import PolicyBatch, RankMetrics, RolloutBatch
from verl.single_controller.wire import num_bytes, pack, unpack


def bits(tensor: Tensor) -> Tensor:
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(-1).view(kinds[tensor.element_size()])


def same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(bits(a), bits(b))


def sent(value):
    return unpack(pickle.loads(pickle.dumps(pack(value), protocol=5)))


TENSORS = {
    "empty": torch.zeros(0, 5),
    "no columns": torch.zeros(4, 0, 0),
    "number": torch.tensor(3.5),
    "ids of 40 bits": torch.tensor([[1 << 40, 5], [-1, 5]]),
    "ids of 31 bits": torch.tensor([[(1 << 31) - 1, 0, 0], [-5, 7, 0]]),
    "ids of 24 bits": torch.tensor([[(1 << 24) - 1, 0, 70_000], [65_535, 65_536, 151_999]]),
    "ids of 16 bits": torch.tensor([[65_535, 0, 0], [9, 7, 0]]),
    "nothing but padding": torch.zeros(3, 7),
    "signed zeros and NaN": torch.tensor([[0.0, -0.0, 1.0, 0.0], [float("nan"), 0.0, 2.0, -0.0], [0.0] * 4]),
    "padding inside": torch.tensor([[0, 1, 0, 1, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0]]),
    "NaN to the right": torch.tensor([[[1.0, 2.0, torch.nan], [3.0, torch.nan, torch.nan]]] * 2),
    "bool": torch.tensor([[True, False, False], [True, True, False]]),
    "one column": torch.randn(5, 1),
    "a view": torch.arange(24.0).view(4, 6).T[1:4],
    "bfloat16": torch.randn(2, 3).bfloat16(),
    "float64": torch.randn(3, 4, dtype=torch.float64),
}


@pytest.mark.parametrize("name", TENSORS)
def test_every_bit_of_a_tensor_arrives(name):
    assert same(sent(TENSORS[name]), TENSORS[name])
    pair = sent((TENSORS[name], 3, None))
    assert same(pair[0], TENSORS[name]) and pair[1:] == (3, None)


def policy_batch(num_rows: int, prompt: int, response: int, share: float) -> PolicyBatch:
    """Responses of 1 to ``2 * share`` of the columns, ids of 150 000 words, one advantage a response."""
    torch.manual_seed(0)
    prompts = torch.randint(1, prompt + 1, (num_rows, 1))
    lengths = torch.randint(1, max(2, int(2 * share * response)), (num_rows, 1)).clamp(max=response)
    lengths = lengths if share < 1 else torch.full_like(lengths, response)
    prompts = prompts if share < 1 else torch.full_like(prompts, prompt)
    columns = torch.arange(prompt + response)
    attention = ((columns >= prompt - prompts) & (columns < prompt + lengths)).long()
    mask = attention[:, prompt:].clone()
    ids = torch.where(attention.bool(), torch.randint(1, 150_000, attention.shape), 0)
    old, rollout, ref = (torch.where(mask.bool(), -torch.rand(mask.shape), 0.0) for _ in range(3))
    advantages = torch.where(mask.bool(), torch.randn(num_rows, 1), 0.0)
    return PolicyBatch(ids, attention, mask, old, rollout, ref, advantages, batch_size=[num_rows])


def test_a_policy_batch_arrives_without_its_padding():
    batch = policy_batch(16, 32, 256, share=0.25)
    found = sent(batch)
    assert isinstance(found, PolicyBatch) and found.batch_size == batch.batch_size
    for name in ("input_ids", "attention_mask", "response_mask", "old_logprobs", "advantages"):
        assert same(getattr(found, name), getattr(batch, name))
    tokens, learned = int(batch.attention_mask.sum()), int(batch.response_mask.sum())
    # Ids of 18 bits, three log-probabilities; of each row less than 100 bytes besides.
    needed = 18 / 8 * tokens + 12 * learned
    assert needed <= num_bytes(pack(batch)) < needed + 16 * 100


def test_what_nothing_reads_is_not_sent_twice():
    # As without a reference policy and without importance sampling; rows of the full length, as 1 to 1024 of a run
    # with prompts of 1k and responses of 8k tokens.
    batch = policy_batch(16, 64, 512, share=1)
    dense = sum(value.nbytes for value in batch.values())
    assert dense == 16 * (2 * 576 * 8 + 512 * 8 + 4 * 512 * 4)
    batch = batch.replace(rollout_logprobs=batch.old_logprobs.clone())
    # At the run's size 336 MiB become 84.
    assert num_bytes(pack(batch)) / dense < 90 / 336
    batch = batch.replace(ref_logprobs=batch.old_logprobs.clone())
    assert same(sent(batch).ref_logprobs, batch.old_logprobs)
    assert num_bytes(pack(batch)) / dense < 60 / 336
    # Rows that are written to afterwards are their own.
    found = sent(batch)
    found.ref_logprobs[0] = 1
    assert same(found.old_logprobs, batch.old_logprobs)


def test_a_rollout_with_its_measures_arrives():
    size = 3
    metrics = RankMetrics(
        TensorDict({"Effective Rank": torch.rand(size, 2, dtype=torch.float64)}, batch_size=[size]),
        torch.rand(size, 2, 8),
        batch_size=[size],
    )
    ids = torch.arange(15).view(size, 5)
    mask = torch.ones(size, 2, dtype=torch.int64)
    rows = (ids, torch.ones_like(ids), mask, -torch.rand(size, 2), torch.tensor([1 << 50, 2, 3]), mask[:, 0].bool())
    rollout = RolloutBatch(*rows, metrics, batch_size=[size])
    for batch in (rollout, rollout.exclude("rank_metrics", "rollout_logprobs"), rollout[:0]):
        found = sent(batch)
        assert len(found) == len(batch)
        assert same(found.group_ids, batch.group_ids) and same(found.input_ids, batch.input_ids)
    found = sent(rollout)
    assert same(found.rank_metrics.by_name["Effective Rank"], metrics.by_name["Effective Rank"])
    assert same(found.rank_metrics.mean_states, metrics.mean_states) and found.rank_metrics.by_prefix is None
