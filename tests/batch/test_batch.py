"""The one batch: episodes in flat columns, chosen, joined, padded and sent without a changed bit."""

import pickle
from collections.abc import Callable

import pytest
import torch
from conftest import rank_columns
from torch import Tensor

from verl.batch import EPISODE, RESPONSE_TOKEN, Batch

PROMPTS = [[1, 2], [3], [4, 5, 70000]]
RESPONSES = [[10, 11, 12], [13], [14, 15]]


def batch(**columns: object) -> Batch:
    """Three episodes with six response tokens."""
    return Batch.of(PROMPTS, RESPONSES, **columns)


RANKS = rank_columns({"Effective Rank": torch.tensor([1.0, 2.0, 3.0])})
PREFIXES = {"prefix/Effective Rank": torch.tensor([[torch.nan], [0.5], [-0.0], [1.5], [torch.nan], [2.5]])}


def test_rows_are_padded_left_and_right() -> None:
    input_ids, attention_mask = batch().rows(pad_token_id=9)
    assert input_ids.tolist() == [[9, 1, 2, 10, 11, 12], [9, 9, 3, 13, 9, 9], [4, 5, 70000, 14, 15, 9]]
    assert attention_mask.tolist() == [[0, 1, 1, 1, 1, 1], [0, 0, 1, 1, 0, 0], [1, 1, 1, 1, 1, 0]]
    assert [rows.shape for rows in batch()[:0].rows()] == [(0, 3), (0, 3)]


def test_columns_are_padded_and_flattened() -> None:
    episodes = batch(rollout_logprobs=torch.arange(6.0))
    padded = episodes.padded("rollout_logprobs", fill=-1.0)
    assert padded.tolist() == [[0, 1, 2], [3, -1, -1], [4, 5, -1]]
    episodes.fill(advantages=padded)
    assert episodes.advantages.tolist() == [0, 1, 2, 3, 4, 5]
    assert episodes.padded("response_tokens").tolist() == [[10, 11, 12], [13, 0, 0], [14, 15, 0]]
    assert episodes.mask.tolist() == [[True, True, True], [True, False, False], [True, True, False]]


def test_several_numbers_a_token_are_not_taken_for_padded_rows() -> None:
    episodes = Batch.of([[1], [2]], [[3, 4], []], top_k_ids=torch.tensor([[5, 6], [7, 8]]))
    assert episodes.top_k_ids.tolist() == [[5, 6], [7, 8]]
    assert episodes.padded("top_k_ids").tolist() == [[[5, 6], [7, 8]], [[0, 0], [0, 0]]]
    prefixes = {"prefix/m": torch.tensor([[5.0, 6.0], [7.0, 8.0]])}
    assert Batch.of([[1], [2]], [[3, 4], []], **prefixes)[[0]].prefix_metrics["m"].tolist() == [[5, 6], [7, 8]]


def test_ambiguous_column_needs_a_kind() -> None:
    short, long, ones = Batch.of([[1]], [[3]]), Batch.of([[1]], [[3, 4]]), torch.ones(2)
    with pytest.raises(
        ValueError, match=r"column own: 1 entries.*fill\('episode', own=\.\.\.\) or fill\('response token'"
    ):
        short.fill(own=ones[:1])
    assert short.fill(values=ones[:1], texts=["a"], own_list=["a"]).kind_of("own_list") == EPISODE
    tokens = Batch.join([short.columns().fill(RESPONSE_TOKEN, own=ones[:1]), long.columns().fill(own=ones)])
    assert tokens[[1]].own.tolist() == [1.0, 1.0]
    episodes = Batch.join([short.columns().fill(EPISODE, own=ones[:1]), long.columns().fill(own=ones[:1])])
    assert episodes[[1]].own.tolist() == [1.0]
    assert short.columns().merge(tokens[[0]]).kind_of("own") == RESPONSE_TOKEN


def test_width_pads_further_until_trimmed() -> None:
    lengths = torch.tensor([1, 1]), torch.tensor([2, 1])
    wide = Batch(*lengths, width=4, rollout_logprobs=torch.ones(3))
    assert wide.padded("rollout_logprobs").shape == (2, 4)
    assert wide.trimmed().padded("rollout_logprobs").tolist() == [[1, 1], [1, 0]]
    assert wide[[1]].trimmed().width == 1


@pytest.mark.parametrize("rows", [[2, 0], [1], [0, 0, 2], torch.tensor([False, True, True]), slice(1, None), []])
def test_chosen_episodes_keep_their_entries(rows: list[int] | Tensor | slice) -> None:
    verdicts = [{"score": score} for score in (0.0, 1.0, 2.0)]
    whole = batch(
        rollout_logprobs=torch.arange(6.0),
        truncated=torch.tensor([True, False, False]),
        texts=["a", "b", "c"],
        verdicts=verdicts,
        **RANKS,
        **PREFIXES,
    )
    places = torch.arange(3)[rows].tolist()
    chosen = whole[rows]
    parts = torch.arange(6.0).split([3, 1, 2])
    assert len(chosen) == len(places)
    assert chosen.tokens.tolist() == [token for i in places for token in PROMPTS[i] + RESPONSES[i]]
    assert chosen.rollout_logprobs.tolist() == [value for i in places for value in parts[i].tolist()]
    assert chosen.texts == ["abc"[i] for i in places]
    assert chosen.verdicts == [verdicts[i] for i in places]
    assert chosen.rank_metrics["Effective Rank"].flatten().tolist() == [i + 1.0 for i in places]
    assert chosen.mean_states.shape == (len(places), 1, 3)
    courses = PREFIXES["prefix/Effective Rank"].split([3, 1, 2])
    expected = torch.cat([courses[i] for i in places]) if places else torch.zeros(0, 1)
    torch.testing.assert_close(chosen.prefix_metrics["Effective Rank"], expected, rtol=0, atol=0, equal_nan=True)


def test_joined_parts_are_the_whole() -> None:
    whole = batch(rollout_logprobs=torch.arange(6.0), texts=["a", "b", "c"], **RANKS)
    joined = Batch.join(list(whole.split(2)))
    assert joined.rows()[0].equal(whole.rows()[0])
    assert joined.rollout_logprobs.equal(whole.rollout_logprobs)
    assert joined.texts == whole.texts
    assert joined.rank_metrics["Effective Rank"].equal(whole.rank_metrics["Effective Rank"])
    lacking = whole.without("texts", "rank/Effective Rank")
    assert {"texts", "rank/Effective Rank"}.isdisjoint(Batch.join([whole, lacking]).names)
    own = batch().fill(own=torch.zeros(3), mine=torch.zeros(3))
    with pytest.raises(ValueError, match=r"Batch.join: some parts lack own, mine; fill it in all, or leave"):
        Batch.join([batch(), own])


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (lambda: batch().values, AttributeError, "column 'values' of the batch is not filled; filled are tokens"),
        (lambda: batch().advantagse, AttributeError, "the batch has no column 'advantagse'; did you mean 'advantages'"),
        (
            lambda: batch().padded("q"),
            AttributeError,
            "the batch has no column 'q'; the columns are advantages, call_counts, correct",
        ),
        (lambda: batch().columns("tokns"), ValueError, "the batch has no column 'tokns'; did you mean 'tokens'"),
        (lambda: batch()[0], TypeError, r"batch\[0\]: not a list, mask or slice of episodes; batch\[\[i\]\]"),
        (lambda: Batch.join([]), ValueError, r"Batch.join\(\[\]\): nothing to join"),
    ],
)
def test_mistakes_are_refused_in_one_line(wrong: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        wrong()
    assert "values" not in batch() and "advantagse" not in batch()


def test_column_of_wrong_length_is_refused() -> None:
    with pytest.raises(ValueError, match=r"column entropy: \(5,\); expected one entry for each of 6 response tokens"):
        batch(entropy=torch.zeros(5))


@pytest.mark.parametrize("name", ["width", "prompt_lengths", "lengths", "mask", "pad"])
def test_column_that_an_attribute_would_hide_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"column {name}: a batch has an attribute of this name; rename it"):
        batch().fill(**{name: torch.zeros(len(batch()))})


def test_travel_changes_no_bit() -> None:
    nan = torch.tensor([1.0, torch.nan, -0.0, 0.0, 5.0, 5.0])
    sent = batch(
        rollout_logprobs=nan,
        advantages=torch.tensor([0.5, 0.5, 0.5, -1.0, 2.0, 2.0]),
        learn_mask=torch.tensor([True, False, True, True, True, True]),
        rewards=torch.tensor([1.0, -1.0, 0.1], dtype=torch.float64),
        group=torch.tensor([-1, 1 << 40, 3]),
        **RANKS,
        **PREFIXES,
        texts=["a", "b", "c"],
        per_token_pair=torch.arange(12.0).view(6, 2),
    )
    back = pickle.loads(pickle.dumps(sent))
    assert back.rows()[0].equal(sent.rows()[0])
    assert back.names == sent.names
    for name in (name for name in sent.names if name != "texts"):
        values, expected = getattr(back, name), getattr(sent, name)
        assert values.dtype == expected.dtype
        assert values.numpy().tobytes() == expected.numpy().tobytes()
    assert back.texts == sent.texts


def test_travel_takes_few_bytes() -> None:
    lengths = torch.full((64,), 1024)
    tokens = torch.randint(152_000, (64 * 1040,))
    sent = Batch(torch.full((64,), 16), lengths, tokens=tokens)
    sent.fill(old_logprobs=torch.rand(64 * 1024), advantages=torch.rand(64).repeat_interleave(1024))
    columns = sent.__getstate__()["columns"]
    assert columns["tokens"].num_bytes == 64 * 1040 * 18 // 8
    assert columns["old_logprobs"].num_bytes == 64 * 1024 * 4
    assert columns["advantages"].num_bytes == 64 * 4


def test_neighbours_are_copies() -> None:
    whole = batch(rollout_logprobs=torch.arange(6.0))
    part = whole[1:]
    part.rollout_logprobs.zero_()
    assert whole.rollout_logprobs.tolist() == [0, 1, 2, 3, 4, 5]
    assert whole[2:1].tokens.tolist() == [] and whole[::2].tokens.tolist() == [1, 2, 10, 11, 12, 4, 5, 70000, 14, 15]
