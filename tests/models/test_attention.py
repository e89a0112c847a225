"""What packed attention promises and what it refuses; agreement with padded rows is in test_forward.py."""

from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from verl.config import ConfigError
from verl.config.common import PACKED_ATTENTION
from verl.models import attention
from verl.models.attention import MASK_FUNCTIONS, grouped_query_options, packed_attention

ROWS = {"cu_seq_lens_q": torch.tensor([0, 3, 4, 6], dtype=torch.int32), "max_length_q": 3}
"""Rows of 3, 1 and 2 tokens."""


def test_the_config_names_the_implementations_that_are_there():
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


def test_the_kernel_of_torch_2_11_needs_no_word_of_grouped_heads(monkeypatch):
    def older(query, key, value, cu_q, cu_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1)):
        assert (key.shape[1], max_q, window_size) == (2, 3, (1, 0))
        return query

    states = torch.randn(1, 4, 6, 8)
    monkeypatch.setattr(attention, "varlen_attn", older)
    monkeypatch.setattr(attention, "GROUPED_QUERY_OPTIONS", grouped_query_options(older))
    rows = attention.Rows.alike(*ROWS.values())
    found = attention._varlen(states, states[:, :2], states[:, :2], rows, None, 2)
    assert torch.equal(found, states.transpose(1, 2))


def test_flash_attention_gets_values_as_wide_as_keys(monkeypatch):
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


def test_the_kernel_gets_heads_of_the_widths_it_has():
    def fits(width: int, value_width: int, dtype: torch.dtype = torch.bfloat16, is_cuda: bool = True) -> bool:
        query, value = (SimpleNamespace(is_cuda=is_cuda, dtype=dtype, shape=(1, 4, 6, w)) for w in (width, value_width))
        return attention._has_varlen_kernel(query, value)

    assert fits(64, 64) and fits(256, 256)
    # Wider than the kernel's; not a multiple of 8; values narrower than keys, as of DeepSeek.
    assert not any(
        [fits(512, 512), fits(100, 100), fits(192, 128), fits(64, 64, torch.float32), fits(64, 64, is_cuda=False)]
    )


@pytest.mark.parametrize(
    ("options", "named"),
    [({"is_causal": False}, "is_causal=False"), ({"s_aux": torch.zeros(1)}, "s_aux"), ({"softcap": 5.0}, "softcap")],
)
def test_what_packed_rows_cannot_have_is_refused(options: dict[str, object], named: str):
    states = torch.zeros(1, 1, 6, 2)
    message = f"^model.attn_implementation='sdpa': packed rows do not support {named}, which Module uses; set"
    with pytest.raises(ConfigError, match=message):
        packed_attention(nn.Module(), states, states, states, None, implementation="sdpa", **ROWS, **options)


def test_a_mask_of_the_models_own_is_refused():
    states = torch.zeros(1, 1, 6, 2)
    with pytest.raises(ConfigError, match="packed rows do not support a mask of its own, which Module uses"):
        packed_attention(nn.Module(), states, states, states, torch.zeros(1, 1, 6, 6), implementation="sdpa", **ROWS)


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
