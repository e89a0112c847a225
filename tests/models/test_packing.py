"""Where the tokens of a micro-batch stand while a model reads them."""

import pytest
import torch

from verl.models.packing import PackedLayout, PaddedLayout, position_ids, trim_columns


@pytest.mark.parametrize(
    ("columns", "trimmed"),
    [
        (
            ([[0, 0, 1, 2, 0], [0, 4, 5, 6, 0]], [[0, 0, 1, 1, 0], [0, 1, 1, 1, 0]], [[1, 0, 0], [1, 1, 0]]),
            ([[0, 1, 2], [4, 5, 6]], [[0, 1, 1], [1, 1, 1]], [[1, 0], [1, 1]]),
        ),
        # Full rows stay; what counts is the mask: many models pad with a token that also ends every turn.
        (([[0, 5, 0]], [[1, 1, 1]], [[1]]), ([[0, 5, 0]], [[1, 1, 1]], [[1]])),
    ],
)
def test_trimming_cuts_what_is_padding_in_every_row(columns, trimmed):
    assert [t.tolist() for t in trim_columns(*map(torch.tensor, columns))] == list(trimmed)


def test_positions_count_real_tokens_alone():
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    assert position_ids(mask).tolist() == [[0, 0, 0, 1, 2], [0, 1, 2, 2, 2], [0, 1, 2, 3, 4]]


IDS = torch.tensor([[0, 0, 11, 12, 13], [21, 22, 23, 24, 0], [0, 31, 32, 0, 0]])
MASK = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 0], [0, 1, 1, 0, 0]])


def test_packed_rows_follow_each_other_and_start_again_at_0():
    inputs = PackedLayout(IDS, MASK, None).inputs
    assert inputs["input_ids"].tolist() == [[11, 12, 13, 21, 22, 23, 24, 31, 32]]
    assert inputs["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2, 3, 0, 1]]
    assert inputs["cu_seq_lens_q"].tolist() == inputs["cu_seq_lens_k"].tolist() == [0, 3, 7, 9]
    assert inputs["cu_seq_lens_q"].dtype == torch.int32
    assert inputs["max_length_q"] == inputs["max_length_k"] == 4
    assert "attention_mask" not in inputs
    # A row of padding alone is no row.
    empty = PackedLayout(IDS[:2], MASK[:2] * torch.tensor([[1], [0]]), None).inputs
    assert empty["cu_seq_lens_q"].tolist() == [0, 3]


def test_what_tokens_get_returns_to_their_columns():
    packed, padded = PackedLayout(IDS, MASK, None), PaddedLayout(IDS, MASK)
    for layout in (packed, padded):
        assert torch.equal(layout.unpack(layout.pack(IDS)) * MASK, IDS)
    pairs = torch.stack([packed.pack(IDS), -packed.pack(IDS)], dim=1).float().requires_grad_()
    restored = packed.unpack(pairs)
    assert torch.equal(restored[..., 1], -IDS.float())
    # Columns weighted by 0..14: each token's gradient is its own column's weight.
    (restored[..., 0] * torch.arange(15).view(3, 5)).sum().backward()
    assert pairs.grad[:, 0].tolist() == [2, 3, 4, 5, 6, 7, 8, 11, 12]
