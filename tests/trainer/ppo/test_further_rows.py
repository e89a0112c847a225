"""Histories of agents' sessions as rows of an update."""

from typing import Any

import pytest
import torch

from verl.algorithms.losses import LOSS_AGGREGATIONS, BatchSize
from verl.batch import ENVIRONMENT, POLICY, Batch
from verl.trainer.ppo.further_rows import num_shared, with_further_rows
from verl.trainer.ppo.updates import mini_batches


def row(prompt: list[int], tokens: list[int], source: list[int]) -> dict[str, Any]:
    logprobs = [-0.5 * token if by == POLICY else 0.0 for token, by in zip(tokens, source, strict=True)]
    return {"prompt_ids": prompt, "tokens": tokens, "source": source, "rollout_logprobs": logprobs}


@pytest.fixture
def batch() -> Batch:
    """Three sessions; the first has two further histories and the second is not learned from."""
    p, e = POLICY, ENVIRONMENT
    batch = Batch.of([[1], [1], [2]], [[3, 4, 5], [6, 7], [8]])
    batch.fill(source=torch.tensor([p, e, p, p, p, p], dtype=torch.uint8))
    batch.fill(advantages=torch.tensor([6.0, 0.0, 6.0, -2.0, -2.0, 3.0]), old_logprobs=-0.1 * torch.arange(6.0))
    batch.fill(learn_mask=torch.tensor([1, 0, 1, 0, 0, 1]).bool(), group=torch.tensor([0, 0, 1]))
    batch.fill(learned=torch.tensor([True, False, True]))
    further = [[row([9, 9], [3, 4], [p, e]), row([8], [5], [p])], [row([7], [2, 2], [p, p])], []]
    return batch.widened(4).fill(further_rows=further)


def score(further: Batch) -> Batch:
    columns = further.columns("tokens")
    return columns.fill(old_logprobs=-0.2 * further.response_tokens, learn_mask=torch.ones(len(further.source)).bool())


def test_histories_follow_their_session_and_share_its_advantage(batch):
    rows = with_further_rows(batch, score)
    assert rows.episode.tolist() == [0, 0, 0, 1, 1, 2] and rows.group.tolist() == [0, 0, 0, 0, 0, 1]
    assert rows.response_lengths.tolist() == [3, 2, 1, 2, 2, 1] and rows.width == 4
    assert rows.advantages.tolist() == [2, 0, 2, 2, 0, 2, -1, -1, -1, -1, 3]
    # Nothing is learned from the environment, nor from a session that is not learned from.
    assert rows.learn_mask.tolist() == [True, False, True, True, False, True, False, False, False, False, True]


def test_rows_that_the_rules_reject_are_not_learned_from(batch):
    rows = with_further_rows(batch, lambda further: score(further).fill(learn_mask=further.response_tokens != 5))
    assert rows.learn_mask[rows.response_tokens == 5].tolist() == [True, False]
    # Whitening leaves 0 on a rejected token, which does not lower the other rows' advantage.
    batch.learn_mask[0] = False
    batch.advantages[0] = 0.0
    assert with_further_rows(batch, score).advantages[3:6].tolist() == [2, 0, 2]
    # A session whose row is rejected still learns from its other rows.
    batch.learn_mask[:3] = False
    rows = with_further_rows(batch, score)
    assert rows.learn_mask.tolist() == [False, False, False, True, False, True, *[False] * 4, True]


def test_sessions_without_further_histories_stay_as_they_are(batch):
    whole = batch[[2]]
    rows = with_further_rows(whole, score)
    assert "episode" not in rows and rows.tokens.equal(whole.tokens) and "further_rows" not in rows


def test_mini_batches_hold_whole_sessions_and_count_them(batch):
    minis = [(m.episode.tolist(), n, s) for m, n, s in mini_batches(with_further_rows(batch, score), 1)]
    assert minis == [([0, 0, 0], 4, 1), ([2], 1, 1)]


@pytest.mark.parametrize("mode", ["seq-mean-token-mean", "seq-mean-token-sum", "token-mean"])
def test_the_loss_is_that_of_a_loop_over_rows(batch, mode):
    rows = with_further_rows(batch, score, mode == "seq-mean-token-mean")
    ((_, num_tokens, num_sequences),) = mini_batches(rows, 3)
    size = BatchSize(num_tokens, num_sequences, 4)
    losses = rows.pad(-rows.advantages.double() * rows.response_tokens, 0.0)
    loss = LOSS_AGGREGATIONS[mode](losses, rows.padded("learn_mask"), size)
    expected = 0.0
    for advantage, histories in ((6.0, [[3, 5], [3], [5]]), (3.0, [[8]])):
        for history in histories:
            share = [-advantage / len(histories) * token for token in history]
            if mode == "token-mean":
                expected += sum(share) / 5
            else:
                expected += sum(share) / (len(share) if mode == "seq-mean-token-mean" else 1) / 2
    assert loss.item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("mode", ["seq-mean-token-mean", "seq-mean-token-sum", "token-mean"])
def test_shared_tokens_have_the_weights_of_their_rows(mode):
    p, e = POLICY, ENVIRONMENT
    batch = Batch.of([[1], [2]], [[3, 4, 5], [8]]).fill(source=torch.tensor([p, e, p, p], dtype=torch.uint8))
    batch.fill(advantages=torch.tensor([6.0, 0.0, 6.0, 3.0]), old_logprobs=torch.zeros(4))
    batch.fill(learn_mask=batch.source == p, group=torch.tensor([0, 1]), learned=torch.ones(2).bool())
    # The second history leaves the first one after token 3, and the third one the second after token 7.
    further = [[row([1, 3, 9], [7, 4, 2], [p, e, p]), row([1, 3, 9, 7, 6], [5], [p])], []]
    rows = with_further_rows(batch.widened(4).fill(further_rows=further), score, mode == "seq-mean-token-mean")
    if mode != "seq-mean-token-mean":
        assert rows.advantages.tolist() == [6, 0, 2, 4, 0, 2, 2, 3]
    # As a loop over whole histories, each with a third of the advantage.
    ((_, num_tokens, num_sequences),) = mini_batches(rows, 2)
    losses = rows.pad(-rows.advantages.double() * rows.response_tokens, 0.0)
    loss = LOSS_AGGREGATIONS[mode](losses, rows.padded("learn_mask"), BatchSize(num_tokens, num_sequences, 4))
    total = -3.0 * 8
    for history in ([3, 5], [3, 7, 2], [3, 7, 5]):
        total += sum(-6.0 / 3 * token for token in history) / (len(history) if mode == "seq-mean-token-mean" else 1)
    assert loss.item() == pytest.approx(total / (6 if mode == "token-mean" else 2), rel=1e-7)


def test_histories_share_only_what_their_prompts_begin_with():
    def shared(*rows: tuple[list[int], list[int]]) -> list[list[int]]:
        return num_shared([(torch.tensor(prompt), torch.tensor(response)) for prompt, response in rows]).tolist()

    assert shared(([1], [3, 4]), ([1], [3, 4])) == [[2, 0], [0, 2]]
    rows = [([1], [3, 4]), ([1, 3, 4, 5], [6]), ([1, 3, 9], [4]), ([2, 3], [4])]
    assert shared(*rows) == [[2, 2, 1, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]
    assert shared(([1, 2], [3]), ([1], [2, 3])) == [[1, 0], [1, 2]]
