"""Linear layers that compute float32 products with oneDNN on CPUs.

torch uses MKL, whose AVX-512 kernels run only on Intel processors. oneDNN, which ships with torch, is more than twice
as fast on AMD processors (benchmarks/products.md) and no slower on others.

Shapes: K input features, N output features.
"""

import platform
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

MIN_ROWS = 64
"""Minimum number of rows for which oneDNN is used, since its calls have more overhead than MKL's."""


def multiply_by_onednn(model: nn.Module) -> None:
    """Make the linear layers of ``model`` use oneDNN where it is faster. The model must be on a CPU."""
    if available():
        for module in model.modules():
            if type(module) is nn.Linear:
                module.forward = partial(_forward, module)  # type: ignore[method-assign]


def available() -> bool:
    """Return whether torch includes oneDNN and the processor is x86, where oneDNN is at least as fast as MKL."""
    return (
        platform.machine() in ("x86_64", "AMD64")
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def _forward(module: nn.Linear, states: Tensor) -> Tensor:
    weight, bias = module.weight, module.bias
    is_small = states.numel() < MIN_ROWS * states.shape[-1]
    if is_small or states.dtype != torch.float32 or weight.dtype != torch.float32:
        return F.linear(states, weight, bias)
    if not torch.is_grad_enabled():
        return product(states, weight, bias)
    result: Tensor = _Linear.apply(states, weight, bias)  # type: ignore[no-untyped-call]
    return result


def product(states: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``states @ weight.T + bias``, [..., N], for ``states [..., K]``, ``weight [N, K]`` and ``bias [N]``."""
    result: Tensor = torch.ops.mkldnn._linear_pointwise(states, weight, bias, "none", [], "")
    return result


def weight_gradient(gradient: Tensor, states: Tensor) -> Tensor:
    """Return the weight gradient [N, K] from the output ``gradient [M, N]`` and the input ``states [M, K]``."""
    if gradient.shape[1] > states.shape[1]:
        # oneDNN is up to three times faster if the first factor has fewer rows than the second.
        return product(states.t(), gradient.t()).t()
    return product(gradient.t(), states.t())


class _Linear(torch.autograd.Function):
    """Differentiable version of :func:`torch.nn.functional.linear`."""

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
