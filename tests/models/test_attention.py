"""How rows are laid out for a model, and what packed attention promises and refuses; agreement with padded rows is in
test_forward.py."""

from importlib.util import find_spec
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from verl.batch import Batch
from verl.config.common import PACKED_ATTENTION
from verl.models import attention
from verl.models.attention import MASK_FUNCTIONS, Options, packed_attention
from verl.models.packing import (
    ROUND_TO,
    Rows,
    SharedPrompts,
    _bounds,
    blocks_by_length,
    packed_layout,
    padded_layout,
    shared_prompt_layout,
)

ROWS = {"cu_seq_lens_q": torch.tensor([0, 3, 4, 6], dtype=torch.int32), "max_length_q": 3}
"""Rows of 3, 1 and 2 tokens."""


def test_config_lists_the_packed_implementations():
    assert list(MASK_FUNCTIONS) == sorted(PACKED_ATTENTION, key=list(MASK_FUNCTIONS).index)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_tokens_see_their_own_row_up_to_themselves(implementation: str):
    # Values are the token's number; with keys of 0 every seen token weighs the same, so outputs are means.
    numbers = torch.arange(6.0).view(1, 1, 6, 1).expand(1, 2, 6, 1)
    zeros = torch.zeros_like(numbers)
    for window, expected in ((None, [0, 0.5, 1, 3, 4, 4.5]), (2, [0, 0.5, 1.5, 3, 4, 4.5])):
        output, _ = packed_attention(
            nn.Module(), zeros, zeros, numbers, None, implementation=implementation, sliding_window=window, **ROWS
        )
        assert output[..., 0].flatten(0, 1).T.tolist() == [expected, expected]
        # As from the attention functions of transformers: models take views of it.
        assert output.is_contiguous()


def test_varlen_kernel_of_torch_2_11_takes_grouped_heads(monkeypatch):
    def older(query, key, value, cu_q, cu_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1)):
        assert (key.shape[1], max_q, window_size) == (2, 3, (1, 0))
        return query

    states = torch.randn(1, 4, 6, 8)
    monkeypatch.setattr(attention, "varlen_attn", older)
    rows = Rows(*[ROWS["cu_seq_lens_q"]] * 2, 3, 3)
    found = attention._varlen(states, states[:, :2], states[:, :2], rows, Options("sdpa", None, 2, None))
    assert torch.equal(found, states.transpose(1, 2))


def test_flash_attention_pads_values_to_the_width_of_keys(monkeypatch):
    def kernel(query, key, value, mask, **options):
        assert query.shape == key.shape == value.shape == (1, 6, 2, 12)
        return value

    monkeypatch.setattr(attention, "_flash_attention_forward", kernel)
    bounds = {"cu_seq_lens_q": torch.tensor([0, 6], dtype=torch.int32), "max_length_q": 6}
    # As in DeepSeek's attention.
    query, value = torch.randn(1, 2, 6, 12), torch.randn(1, 2, 6, 8)
    for rows in ({}, bounds):
        found, _ = packed_attention(nn.Module(), query, query, value, None, implementation="flash_attention_2", **rows)
        assert torch.equal(found, value.transpose(1, 2))


def test_varlen_kernel_takes_supported_widths_only():
    def fits(width: int, value_width: int, dtype: torch.dtype = torch.bfloat16, is_cuda: bool = True) -> bool:
        query, value = (SimpleNamespace(is_cuda=is_cuda, dtype=dtype, shape=(1, 4, 6, w)) for w in (width, value_width))
        return attention._has_varlen_kernel(query, value, Options("sdpa", None, None, None))

    assert fits(64, 64) and fits(256, 256)
    # Wider than the kernel's; not a multiple of 8; values narrower than keys, as of DeepSeek.
    assert not any(
        [fits(512, 512), fits(100, 100), fits(192, 128), fits(64, 64, torch.float32), fits(64, 64, is_cuda=False)]
    )


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"is_causal": False}, "is_causal=False"),
        ({"s_aux": torch.zeros(1)}, "s_aux"),
        ({"softcap": 5.0}, "softcap"),
        ({"attention_mask": torch.zeros(1, 1, 6, 6)}, "a mask of its own"),
    ],
)
def test_option_that_packed_rows_lack_is_refused(refused, options: dict[str, object], named: str):
    states, options = torch.zeros(1, 1, 6, 2), {"attention_mask": None} | options
    with refused(f"model.attn_implementation='sdpa': packed rows do not support {named}, which Module uses; set..."):
        packed_attention(nn.Module(), states, states, states, implementation="sdpa", **ROWS, **options)


NEEDS_FLASH = pytest.mark.skipif(find_spec("flash_attn") is None, reason="needs the package flash-attn")


def attend(implementation: str, dtype: torch.dtype, sliding_window: int | None) -> tuple[Tensor, list[Tensor]]:
    """Output and gradients of attention with grouped heads over rows of 5, 1, 70 and 24 tokens."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    shapes = [(1, heads, 100, 64) for heads in (8, 2, 2)]
    states = [torch.randn(shape, generator=generator, device="cuda") for shape in shapes]
    weights = torch.randn(1, 100, 8, 64, generator=generator, device="cuda")
    states = [tensor.to(dtype).requires_grad_() for tensor in states]
    bounds = torch.tensor([0, 5, 6, 76, 100], dtype=torch.int32, device="cuda")
    options = {"implementation": implementation, "sliding_window": sliding_window}
    output, _ = packed_attention(nn.Module(), *states, None, **options, cu_seq_lens_q=bounds, max_length_q=70)
    (output.float() * weights).sum().backward()
    return output.detach().float(), [tensor.grad.float() for tensor in states]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("sliding_window", [None, 10])
@pytest.mark.parametrize("implementation", ["sdpa", pytest.param("flash_attention_2", marks=NEEDS_FLASH)])
def test_kernels_agree_with_one_row_after_the_other(implementation: str, sliding_window: int | None):
    expected, expected_gradients = attend("eager", torch.float32, sliding_window)
    found, gradients = attend(implementation, torch.bfloat16, sliding_window)
    torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)
    for gradient, reference in zip(gradients, expected_gradients, strict=True):
        assert (gradient - reference).norm() < 2e-2 * reference.norm()


EPISODES = Batch.of([[11, 12], [21, 22, 23], [11, 12], [21, 22, 23]], [[31], [41, 42], [51], []])
UNEVEN = Batch.of(
    [[11, 12], [21, 22, 23], [11, 12], [21, 22, 23], [11, 12], [21, 22, 23]],
    [[31], [41] * 9, [], [51] * 4, [61] * 8, [71] * 3],
)


def varlen_reference(query, key, value, queries, keys, most_queries, most_keys, *, scale=None, window_size, **_):
    """What torch's kernel computes: row by row, the last query aligned with the last key."""
    repeats = query.shape[1] // key.shape[1]
    key, value = (states.repeat_interleave(repeats, dim=1) for states in (key, value))
    outputs = []
    for (q0, q1), (k0, k1) in zip(pairwise(queries.tolist()), pairwise(keys.tolist()), strict=True):
        assert q1 - q0 <= most_queries and k1 - k0 <= most_keys
        places = torch.arange(k1 - k0, device=query.device)
        distance = places[k1 - k0 - (q1 - q0) :, None] - places
        seen = (distance >= 0) & ((window_size[0] < 0) | (distance <= window_size[0]))
        scores = torch.einsum("qhd,khd->hqk", query[q0:q1], key[k0:k1]) * (scale or query.shape[-1] ** -0.5)
        weights = scores.masked_fill(~seen, -torch.inf).softmax(dim=-1)
        outputs.append(torch.einsum("hqk,khd->qhd", weights, value[k0:k1]))
    return torch.cat(outputs)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("window", [None, 10])
@pytest.mark.parametrize(("queries", "keys"), [([3, 0, 5, 1, 70], [3, 4, 9, 6, 90]), ([4, 130], [130, 300])])
def test_kernel_agrees_on_shared_prompts_and_empty_rows(queries: list[int], keys: list[int], window: int | None):
    """Rows with more keys than queries, as of shared prompts, and a row without a query."""
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [(1, heads, sum(lengths), 64) for heads, lengths in ((8, queries), (2, keys), (2, keys))]
    states = [torch.randn(shape, device="cuda", generator=generator).bfloat16().requires_grad_() for shape in shapes]
    rows = Rows(*(_bounds(torch.tensor(lengths)).cuda() for lengths in (queries, keys)), max(queries), max(keys))
    found = attention._varlen(*states, rows, Options("sdpa", None, window, None))[0]
    exact = [tensor.detach().float().requires_grad_() for tensor in states]
    window_size = (-1 if window is None else window - 1, 0)
    expected = varlen_reference(*(tensor[0].transpose(0, 1) for tensor in exact), *rows, window_size=window_size)
    weights = torch.randn(expected.shape, device="cuda", generator=generator)
    for output in (found.float(), expected):
        (output * weights).sum().backward()
    pairs = [(found, expected), *((one.grad, other.grad) for one, other in zip(states, exact, strict=True))]
    for value, reference in pairs:
        assert (value.float() - reference).norm() < 2e-2 * reference.norm()


@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("way", ["sdpa", "eager", "varlen"])
@pytest.mark.parametrize("episodes", [EPISODES, UNEVEN])
def test_shared_prompts_attend_as_whole_rows(
    episodes: Batch, way: str, window: int | None, monkeypatch: pytest.MonkeyPatch
):
    """Against each row computed by itself; four query heads share two of keys; in float64."""
    layout, _ = shared_prompt_layout(episodes)
    num_tokens = layout.inputs["shared_prompts"].num_tokens
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, heads, ROUND_TO, 8, generator=generator, dtype=torch.float64) for heads in (4, 2, 2)
    )
    if way == "varlen":
        monkeypatch.setattr(attention, "_has_varlen_kernel", lambda *_: True)
        monkeypatch.setattr(attention, "varlen_attn", varlen_reference)
    found, _ = packed_attention(
        nn.Module(), query, key, value, None, implementation="eager" if way == "eager" else "sdpa",
        sliding_window=window, shared_prompts=layout.inputs["shared_prompts"],
    )  # fmt: skip
    assert found.is_contiguous() and not found[0, num_tokens:].any()
    for tokens in layout.places.split(episodes.lengths.tolist()):
        bounds = torch.tensor([0, len(tokens)], dtype=torch.int32)
        options = {"implementation": "sdpa", "sliding_window": window}
        states = (states[:, :, tokens] for states in (query, key, value))
        alone, _ = packed_attention(
            nn.Module(), *states, None, cu_seq_lens_q=bounds, max_length_q=len(tokens), **options
        )
        torch.testing.assert_close(found[0, tokens], alone[0], rtol=0, atol=1e-6 if way == "eager" else 1e-12)


def test_blocks_hold_rows_of_similar_length():
    blocks = blocks_by_length(UNEVEN.response_lengths)
    # 9 and 8 tokens, 4 and 3, 1, none.
    assert [(block.rows.tolist(), block.longest) for block in blocks] == [([1, 4], 9), ([3, 5], 4), ([0], 1), ([2], 1)]
    shared = shared_prompt_layout(UNEVEN)[0].inputs["shared_prompts"]
    assert [tokens.shape for tokens in shared.prompt_blocks] == [(2, 3)]
    # Rows 1 and 4 have a prompt of 3 tokens and one of 2; row 0 has only one of 2, and so has row 2.
    shapes = [(own.shape[1], seen.shape[1]) for own, seen in shared.response_blocks]
    assert shapes == [(9, 12), (4, 7), (1, 3), (1, 3)]


def test_shared_prompt_without_response_and_vice_versa():
    shared = SharedPrompts(torch.tensor([0, 2]), torch.tensor([3, 0, 0]), torch.tensor([0, 1, 1]))
    states = torch.randn(1, 1, 5, 4, dtype=torch.float64)
    found, _ = packed_attention(nn.Module(), states, states, states, None, implementation="sdpa", shared_prompts=shared)
    assert found.isfinite().all()
    # The first token of the prompt, and that of the response without one, see themselves alone.
    assert torch.equal(found[0, [0, 2], 0], states[0, 0, [0, 2]])


def test_packed_rows_are_contiguous():
    inputs = packed_layout(EPISODES).inputs
    assert inputs["input_ids"].tolist() == [[11, 12, 31, 21, 22, 23, 41, 42, 11, 12, 51, 21, 22, 23]]
    assert inputs["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 2]]
    assert inputs["cu_seq_lens_q"].tolist() == inputs["cu_seq_lens_k"].tolist() == [0, 3, 8, 11, 14]
    assert inputs["cu_seq_lens_q"].dtype == torch.int32
    assert inputs["max_length_q"] == inputs["max_length_k"] == 5
    assert "attention_mask" not in inputs
    # An episode without tokens is no row.
    assert packed_layout(Batch.of([[1], []], [[2], []])).inputs["cu_seq_lens_q"].tolist() == [0, 2]


def test_shared_prompts_come_before_responses():
    layout, saved = shared_prompt_layout(EPISODES)
    ids, positions = (layout.inputs[name][0] for name in ("input_ids", "position_ids"))
    assert len(ids) == len(positions) == ROUND_TO and saved == pytest.approx(5 / 14)
    assert ids[:9].tolist() == [11, 12, 21, 22, 23, 31, 41, 42, 51] and not ids[9:].any()
    assert positions[:9].tolist() == [0, 1, 0, 1, 2, 2, 3, 4, 2]
    # A prompt's last token predicts the first of every response.
    assert layout.find(EPISODES.predictors)[0].tolist() == [1, 4, 6, 1]


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [2, 0, 3, 1]])
def test_layout_knows_the_place_of_each_token(order: list[int]):
    batch = EPISODES[order]
    for layout in (padded_layout(batch), packed_layout(batch), shared_prompt_layout(batch)[0]):
        assert layout.inputs["input_ids"].flatten()[layout.places].equal(batch.tokens)
