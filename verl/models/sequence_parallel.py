"""Ulysses sequence parallelism (arXiv 2309.14509): neighbouring workers share the tokens of each sequence.

Everything but attention works on single tokens, so each worker of a group holds a slice of them. For attention a worker
gets all tokens of a share of the heads: one exchange before it, one after.

Legend: G workers of a group, H heads, t tokens of this worker, T = G t tokens of all, D head width.
"""

import math
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from verl.utils.distributed import collective_timeout


@cache
def sequence_group(size: int) -> ProcessGroup | None:
    """The group of ``size`` neighbours in rank that this worker belongs to; None for a size of 1.

    All workers must call it together. Models share one group, because each group has its own communicator, and that
    takes GPU memory.
    """
    if size == 1:
        return None
    group, _ = dist.new_subgroups(size, timeout=collective_timeout())
    assert isinstance(group, ProcessGroup)
    return group


def split_heads(states: Tensor, group: ProcessGroup) -> Tensor:
    """From [H, t, D], all heads of this worker's tokens, to [H / G, T, D], all tokens of this worker's heads.

    Heads of keys and values that cannot be split are repeated first, each next to itself, so that every worker has
    those that its queries ask for.
    """
    repeats = group.size() // math.gcd(states.shape[0], group.size())
    if repeats > 1:
        states = states.repeat_interleave(repeats, dim=0)
    return _SplitHeads.apply(states, group)  # type: ignore[no-any-return, no-untyped-call]  # torch's


def gather_heads(states: Tensor, group: ProcessGroup) -> Tensor:
    """The inverse of :func:`split_heads`: from [H / G, T, D] to [H, t, D]."""
    return _GatherHeads.apply(states, group)  # type: ignore[no-any-return, no-untyped-call]  # torch's


def gather_tokens(values: Tensor, group: ProcessGroup) -> Tensor:
    """From [t, ...] of each worker to [T, ...] on all.

    The gradient that comes back must be the same on all workers, which it is if all compute the same loss from here on:
    each worker keeps its own slice of it.
    """
    return _GatherTokens.apply(values, group)  # type: ignore[no-any-return, no-untyped-call]  # torch's


def _exchange(parts: Tensor, group: ProcessGroup) -> Tensor:
    """Send ``parts[g]`` to worker g; returns what each worker sent, in their order."""
    parts = parts.contiguous()
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return received


def _heads_to_tokens(states: Tensor, group: ProcessGroup) -> Tensor:
    heads, tokens, width = states.shape
    received = _exchange(states.view(group.size(), heads // group.size(), tokens, width), group)
    return received.transpose(0, 1).reshape(heads // group.size(), group.size() * tokens, width)


def _tokens_to_heads(states: Tensor, group: ProcessGroup) -> Tensor:
    heads, tokens, width = states.shape
    parts = states.reshape(heads, group.size(), tokens // group.size(), width).transpose(0, 1)
    return _exchange(parts, group).flatten(0, 1)


class _SplitHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _heads_to_tokens(states.contiguous(), group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _tokens_to_heads(gradient, ctx.group), None


class _GatherHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _tokens_to_heads(states, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _heads_to_tokens(gradient.contiguous(), ctx.group), None


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        gathered = values.new_empty(group.size() * values.shape[0], *values.shape[1:])
        dist.all_gather_into_tensor(gathered, values.contiguous(), group=group)
        return gathered

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.tensor_split(ctx.group.size())[ctx.group.rank()], None
