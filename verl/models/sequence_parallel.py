"""Ulysses sequence parallelism (arXiv 2309.14509): neighbouring workers share the tokens of each sequence.

Everything but attention works on single tokens, so each worker of a group holds a slice of them. For attention a worker
gets all tokens of a share of the heads: one exchange before it, one after.

Legend: G workers of a group, H heads, t tokens of this worker, T = G t tokens of all, D head width.
"""

import math
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.nn.functional import all_to_all_single

from verl.utils.distributed import collective_timeout


@cache
def sequence_group(size: int) -> ProcessGroup | None:
    """Return the group of ``size`` neighbours in rank that this worker belongs to; None for a size of 1.

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
    size = group.size()
    repeats = size // math.gcd(states.shape[0], size)
    if repeats > 1:
        states = states.repeat_interleave(repeats, dim=0)
    return _exchange(states.unflatten(0, (size, -1)), group).transpose(0, 1).flatten(1, 2)


def gather_heads(states: Tensor, group: ProcessGroup) -> Tensor:
    """Invert :func:`split_heads`: from [H / G, T, D] to [H, t, D]."""
    return _exchange(states.unflatten(1, (group.size(), -1)).transpose(0, 1), group).flatten(0, 1)


def gather_tokens(values: Tensor, group: ProcessGroup) -> Tensor:
    """From [t, ...] of each worker to [T, ...] on all.

    The gradient that comes back must be the same on all workers, which it is if all compute the same loss from here on:
    each worker keeps its own slice of it.
    """
    parts = [torch.empty_like(values) for _ in range(group.size())]
    dist.all_gather(parts, values.detach().contiguous(), group=group)
    parts[group.rank()] = values
    return torch.cat(parts)


def _exchange(parts: Tensor, group: ProcessGroup) -> Tensor:
    """Send ``parts[g]`` to worker g; returns what each worker sent, in their order. Differentiable."""
    parts = parts.contiguous()
    received: Tensor = all_to_all_single(torch.empty_like(parts), parts, group=group)
    return received
