"""How rows are laid out for a model, and how it reads them."""

import pytest
import torch

from verl.batch import Batch
from verl.models.packing import packed_layout, padded_layout, position_ids
from verl.models.shared_prompts import ROUND_TO, shared_prompt_layout

EPISODES = Batch.of([[11, 12], [21, 22, 23], [11, 12], [21, 22, 23]], [[31], [41, 42], [51], []])


def test_padded_rows_are_as_wide_as_the_longest_prompt_and_response():
    inputs = padded_layout(EPISODES[[0, 2]]).inputs
    assert inputs["input_ids"].tolist() == [[11, 12, 31], [11, 12, 51]]
    assert padded_layout(EPISODES[[0, 1]]).inputs["input_ids"].tolist() == [[0, 11, 12, 31, 0], [21, 22, 23, 41, 42]]


def test_positions_count_real_tokens_alone():
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    assert position_ids(mask).tolist() == [[0, 0, 0, 1, 2], [0, 1, 2, 2, 2], [0, 1, 2, 3, 4]]


def test_packed_rows_follow_each_other_and_start_again_at_0():
    inputs = packed_layout(EPISODES).inputs
    assert inputs["input_ids"].tolist() == [[11, 12, 31, 21, 22, 23, 41, 42, 11, 12, 51, 21, 22, 23]]
    assert inputs["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 2]]
    assert inputs["cu_seq_lens_q"].tolist() == inputs["cu_seq_lens_k"].tolist() == [0, 3, 8, 11, 14]
    assert inputs["cu_seq_lens_q"].dtype == torch.int32
    assert inputs["max_length_q"] == inputs["max_length_k"] == 5
    assert "attention_mask" not in inputs
    # An episode without tokens is no row.
    assert packed_layout(Batch.of([[1], []], [[2], []])).inputs["cu_seq_lens_q"].tolist() == [0, 2]


def test_shared_prompts_come_once_then_responses():
    layout, saved = shared_prompt_layout(EPISODES)
    ids, positions = (layout.inputs[name][0] for name in ("input_ids", "position_ids"))
    assert len(ids) == len(positions) == ROUND_TO and saved == pytest.approx(5 / 14)
    assert ids[:9].tolist() == [11, 12, 21, 22, 23, 31, 41, 42, 51] and not ids[9:].any()
    assert positions[:9].tolist() == [0, 1, 0, 1, 2, 2, 3, 4, 2]
    # A prompt's last token predicts the first of every response.
    assert layout.find(EPISODES.predictors)[0].tolist() == [1, 4, 6, 1]


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [2, 0, 3, 1]])
def test_every_layout_knows_where_each_token_is(order: list[int]):
    batch = EPISODES[order]
    for layout in (padded_layout(batch), packed_layout(batch), shared_prompt_layout(batch)[0]):
        assert layout.inputs["input_ids"].flatten()[layout.places].equal(batch.tokens)
