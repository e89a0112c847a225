"""Packed rows on a GPU: the variable-length kernels against one row after the other."""

from importlib.util import find_spec

import pytest
import torch
from torch import Tensor, nn

from verl.models.attention import packed_attention

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

KERNELS = [
    "sdpa",
    pytest.param(
        "flash_attention_2",
        marks=pytest.mark.skipif(find_spec("flash_attn") is None, reason="needs the package flash-attn"),
    ),
]


def attend(implementation: str, dtype: torch.dtype, sliding_window: int | None) -> tuple[Tensor, list[Tensor]]:
    """Output and gradients of attention with grouped heads over rows of 5, 1, 70 and 24 tokens."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    shapes = [(1, heads, 100, 64) for heads in (8, 2, 2)]
    states = [torch.randn(shape, generator=generator, device="cuda") for shape in shapes]
    weights = torch.randn(1, 100, 8, 64, generator=generator, device="cuda")
    states = [tensor.to(dtype).requires_grad_() for tensor in states]
    output, _ = packed_attention(
        nn.Module(),
        *states,
        None,
        implementation=implementation,
        sliding_window=sliding_window,
        cu_seq_lens_q=torch.tensor([0, 5, 6, 76, 100], dtype=torch.int32, device="cuda"),
        max_length_q=70,
    )
    (output.float() * weights).sum().backward()
    return output.detach().float(), [tensor.grad.float() for tensor in states]


@pytest.mark.parametrize("sliding_window", [None, 10])
@pytest.mark.parametrize("implementation", KERNELS)
def test_kernels_agree_with_one_row_after_the_other(implementation: str, sliding_window: int | None):
    expected, expected_gradients = attend("eager", torch.float32, sliding_window)
    found, gradients = attend(implementation, torch.bfloat16, sliding_window)
    torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)
    for gradient, reference in zip(gradients, expected_gradients, strict=True):
        assert (gradient - reference).norm() < 2e-2 * reference.norm()
