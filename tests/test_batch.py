"""The one batch: episodes in flat columns, chosen, joined, padded and sent without a changed bit."""

import pickle

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from verl.batch import Batch, RankMetrics

PROMPTS = [[1, 2], [3], [4, 5, 70000]]
RESPONSES = [[10, 11, 12], [13], [14, 15]]


def batch(**columns: object) -> Batch:
    """Three episodes with six response tokens."""
    return Batch.of(PROMPTS, RESPONSES, **columns)


def rank_metrics(values: list[float]) -> RankMetrics:
    size = [len(values)]
    fields = TensorDict({"Effective Rank": torch.tensor(values)[:, None]}, batch_size=size)
    return RankMetrics(fields, torch.zeros(len(values), 1, 2), batch_size=size)


def test_rows_are_padded_left_and_right() -> None:
    input_ids, attention_mask = batch().rows(pad_token_id=9)
    assert input_ids.tolist() == [[9, 1, 2, 10, 11, 12], [9, 9, 3, 13, 9, 9], [4, 5, 70000, 14, 15, 9]]
    assert attention_mask.tolist() == [[0, 1, 1, 1, 1, 1], [0, 0, 1, 1, 0, 0], [1, 1, 1, 1, 1, 0]]


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
    # Part by part, an undeclared column of tokens may look like one of episodes.
    parts = [Batch.of([[1]], [[3]], of_tokens=torch.tensor([1.0])), Batch.of([[1]], [[3, 4]], of_tokens=torch.ones(2))]
    assert Batch.join(parts)[[1]].of_tokens.tolist() == [1.0, 1.0]


def test_width_pads_further_until_trimmed() -> None:
    lengths = torch.tensor([1, 1]), torch.tensor([2, 1])
    wide = Batch(*lengths, width=4, rollout_logprobs=torch.ones(3))
    assert wide.padded("rollout_logprobs").shape == (2, 4)
    assert wide.trimmed().padded("rollout_logprobs").tolist() == [[1, 1], [1, 0]]
    assert wide[[1]].trimmed().width == 1


@pytest.mark.parametrize(
    "rows",
    [[2, 0], [1], [0, 0, 2], torch.tensor([False, True, True]), slice(1, None), []],
)
def test_chosen_episodes_keep_their_entries(rows: list[int] | Tensor | slice) -> None:
    metrics = rank_metrics([1.0, 2.0, 3.0])
    verdicts = [{"score": score} for score in (0.0, 1.0, 2.0)]
    whole = batch(
        rollout_logprobs=torch.arange(6.0),
        truncated=torch.tensor([True, False, False]),
        texts=["a", "b", "c"],
        verdicts=verdicts,
        rank_metrics=metrics,
    )
    places = torch.arange(3)[rows].tolist()
    chosen = whole[rows]
    parts = torch.arange(6.0).split([3, 1, 2])
    assert len(chosen) == len(places)
    assert chosen.tokens.tolist() == [token for i in places for token in PROMPTS[i] + RESPONSES[i]]
    assert chosen.rollout_logprobs.tolist() == [value for i in places for value in parts[i].tolist()]
    assert chosen.texts == ["abc"[i] for i in places]
    assert chosen.verdicts == [verdicts[i] for i in places]
    assert chosen.rank_metrics.by_name["Effective Rank"].flatten().tolist() == [i + 1.0 for i in places]


def test_joined_parts_are_the_whole() -> None:
    whole = batch(rollout_logprobs=torch.arange(6.0), texts=["a", "b", "c"], rank_metrics=rank_metrics([1, 2, 3]))
    joined = Batch.join(list(whole.split(2)))
    assert joined.rows()[0].equal(whole.rows()[0])
    assert joined.rollout_logprobs.equal(whole.rollout_logprobs)
    assert joined.texts == whole.texts
    assert joined.rank_metrics.by_name["Effective Rank"].equal(whole.rank_metrics.by_name["Effective Rank"])
    assert "texts" not in Batch.join([whole, whole.without("texts")])


def test_missing_column_names_those_filled() -> None:
    with pytest.raises(AttributeError, match="no column 'values'; it has tokens"):
        batch().values  # noqa: B018
    assert "values" not in batch()


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
        rank_metrics=rank_metrics([1.0, 2.0, 3.0]),
        texts=["a", "b", "c"],
        per_token_pair=torch.arange(12.0).view(6, 2),
    )
    back = pickle.loads(pickle.dumps(sent))
    assert back.rows()[0].equal(sent.rows()[0])
    for name in ("rollout_logprobs", "advantages", "learn_mask", "rewards", "group", "per_token_pair"):
        values, expected = getattr(back, name), getattr(sent, name)
        assert values.dtype == expected.dtype
        assert values.numpy().tobytes() == expected.numpy().tobytes()
    assert back.texts == sent.texts
    assert back.rank_metrics.metric_names == ["Effective Rank"]


def test_travel_takes_few_bytes() -> None:
    lengths = torch.full((64,), 1024)
    tokens = torch.randint(152_000, (64 * 1040,))
    sent = Batch(torch.full((64,), 16), lengths, tokens=tokens)
    sent.fill(old_logprobs=torch.rand(64 * 1024), advantages=torch.rand(64).repeat_interleave(1024))
    columns = sent.__getstate__()["columns"]
    assert columns["tokens"].num_bytes == 64 * 1040 * 18 // 8
    assert columns["old_logprobs"].num_bytes == 64 * 1024 * 4
    assert columns["advantages"].num_bytes == 64 * 4


def test_metrics_of_prefixes_travel_without_their_padding() -> None:
    prefixes = torch.full((3, 1, 5000), torch.nan)
    prefixes[:, :, 1] = torch.tensor([[0.5], [-0.0], [2.0]])
    metrics = rank_metrics([1.0, 2.0, 3.0])
    metrics.by_prefix = TensorDict({"Effective Rank": prefixes}, batch_size=[3])
    sent = pickle.dumps(batch(rank_metrics=metrics)[1:])
    assert len(sent) < 2500
    back = pickle.loads(sent).rank_metrics
    assert back.by_name["Effective Rank"].flatten().tolist() == [2.0, 3.0]
    assert back.by_prefix["Effective Rank"].numpy().tobytes() == prefixes[1:].numpy().tobytes()


def test_metrics_of_prefixes_are_joined_at_the_larger_width_or_left_out() -> None:
    narrow, wide, without = (rank_metrics([1.0, 2.0, 3.0]) for _ in range(3))
    narrow.by_prefix = TensorDict({"Effective Rank": torch.ones(3, 1, 2)}, batch_size=[3])
    wide.by_prefix = TensorDict({"Effective Rank": torch.ones(3, 1, 4)}, batch_size=[3])
    joined = Batch.join([batch(rank_metrics=narrow), batch(rank_metrics=wide)]).rank_metrics
    assert joined.by_prefix["Effective Rank"][:, 0].isnan().sum(dim=1).tolist() == [2, 2, 2, 0, 0, 0]
    assert Batch.join([batch(rank_metrics=narrow), batch(rank_metrics=without)]).rank_metrics.by_prefix is None


def test_neighbours_are_copies() -> None:
    whole = batch(rollout_logprobs=torch.arange(6.0))
    part = whole[1:]
    part.rollout_logprobs.zero_()
    assert whole.rollout_logprobs.tolist() == [0, 1, 2, 3, 4, 5]
    assert whole[2:1].tokens.tolist() == [] and whole[::2].tokens.tolist() == [1, 2, 10, 11, 12, 4, 5, 70000, 14, 15]
