"""What packed attention promises and what it refuses; agreement with padded rows is in test_forward.py."""

import pytest
import torch
from torch import Tensor, nn

from verl.config.common import PACKED_ATTENTION
from verl.workers.attention import MASKS, packed_attention


def attend(states: Tensor, **options: object) -> Tensor:
    """Over rows of 3, 1 and 2 tokens, [1, 6, H, D]."""
    bounds = torch.tensor([0, 3, 4, 6], dtype=torch.int32)
    rows = {"cu_seq_lens_q": bounds, "max_length_q": 3}
    return packed_attention(nn.Module(), states, states, states, None, **rows, **options)[0]


def test_the_config_names_the_implementations_that_are_there():
    assert list(MASKS) == sorted(PACKED_ATTENTION, key=list(MASKS).index)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_tokens_see_their_own_row_up_to_themselves(implementation: str):
    # Values are the token's number; with keys of 0 every seen token weighs the same, so outputs are means.
    numbers = torch.arange(6.0).view(1, 1, 6, 1).expand(1, 2, 6, 1)
    bounds = {"cu_seq_lens_q": torch.tensor([0, 3, 4, 6], dtype=torch.int32), "max_length_q": 3}
    zeros = torch.zeros_like(numbers)
    for window, expected in ((None, [0, 0.5, 1, 3, 4, 4.5]), (2, [0, 0.5, 1.5, 3, 4, 4.5])):
        output, _ = packed_attention(
            nn.Module(), zeros, zeros, numbers, None, implementation=implementation, sliding_window=window, **bounds
        )
        assert output[..., 0].flatten(0, 1).T.tolist() == [expected, expected]
        # As from the attention functions of transformers: models take views of it.
        assert output.is_contiguous()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"is_causal": False}, "is_causal=False"),
        ({"s_aux": torch.zeros(1)}, "s_aux"),
        ({"softcap": 5.0}, "softcap"),
    ],
)
def test_what_packed_rows_cannot_have_is_refused(options: dict[str, object], named: str):
    with pytest.raises(ValueError, match=f"^model.attn_implementation='sdpa': packed rows cannot have {named}, which"):
        attend(torch.zeros(1, 1, 6, 2), implementation="sdpa", **options)
