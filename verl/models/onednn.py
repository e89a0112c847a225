"""Linear layers whose float32 products come from oneDNN, on CPUs.

torch multiplies float32 matrices by MKL, which keeps its AVX-512 kernels for Intel's processors. oneDNN, which torch
brings as well, does not: on AMD's it takes less than half the time (benchmarks/products.md), and otherwise as long.

Legend: K inputs, N outputs.
"""

import platform
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

MIN_ROWS = 64
"""Products of fewer rows are left to torch: a call of oneDNN takes longer to begin."""


def multiply_by_onednn(model: nn.Module) -> None:
    """Let the linear layers of ``model``, which computes on a CPU, multiply by oneDNN where that is faster."""
    if available():
        for module in model.modules():
            if type(module) is nn.Linear:
                module.forward = partial(_forward, module)  # type: ignore[method-assign]  # of this instance alone


def available() -> bool:
    """Whether torch was built with oneDNN, for a processor where it is no slower than what torch would call."""
    return (
        platform.machine() in ("x86_64", "AMD64")
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def _forward(module: nn.Linear, states: Tensor) -> Tensor:
    weight, bias = module.weight, module.bias
    few = states.numel() < MIN_ROWS * states.shape[-1]
    if few or states.dtype != torch.float32 or weight.dtype != torch.float32:
        return F.linear(states, weight, bias)
    if not torch.is_grad_enabled():
        return product(states, weight, bias)
    result: Tensor = _Linear.apply(states, weight, bias)  # type: ignore[no-untyped-call]
    return result


def product(states: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``states [..., K]`` times the transpose of ``weight [N, K]``, plus ``bias [N]``: [..., N]."""
    result: Tensor = torch.ops.mkldnn._linear_pointwise(states, weight, bias, "none", [], "")
    return result


def weight_gradient(gradient: Tensor, states: Tensor) -> Tensor:
    """[N, K], from the gradient [M, N] of a product and the states [M, K] that went into it."""
    if gradient.shape[1] > states.shape[1]:
        # oneDNN is faster, by up to three times, if its first factor has fewer rows than its second.
        return product(states.t(), gradient.t()).t()
    return product(gradient.t(), states.t())


class _Linear(torch.autograd.Function):
    """:func:`torch.nn.functional.linear`."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(states, weight)
        return product(states, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        states, weight = ctx.saved_tensors
        of_states, of_weight, of_bias = ctx.needs_input_grad
        rows = gradient.flatten(0, -2)
        return (
            product(gradient, weight.t()) if of_states else None,
            weight_gradient(rows, states.flatten(0, -2)) if of_weight else None,
            rows.sum(dim=0) if of_bias else None,
        )
