"""Ulysses sequence parallelism (arXiv 2309.14509): neighbouring workers split the tokens of each sequence.

Outside attention, each worker in a group processes only its own slice of the tokens. Before attention, an all-to-all
sends each worker all tokens for a subset of the heads. After attention, a second all-to-all restores the slices.

Shapes: G workers per group, H heads, t tokens per worker, T = G t tokens per group, D head dimension.
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
    """Return this worker's group of ``size`` neighbouring ranks, or None if ``size`` is 1.

    All workers must call this function together. All models share this group, since each communicator uses GPU memory.
    """
    if size == 1:
        return None
    group, _ = dist.new_subgroups(size, timeout=collective_timeout())
    assert isinstance(group, ProcessGroup)
    return group


def split_heads(states: Tensor, group: ProcessGroup) -> Tensor:
    """Convert [H, t, D] (all heads of this worker's tokens) to [H / G, T, D] (all tokens of this worker's heads).

    Key and value heads that cannot be split evenly are repeated, so every worker has the heads that its queries need.
    """
    size = group.size()
    repeats = size // math.gcd(states.shape[0], size)
    if repeats > 1:
        states = states.repeat_interleave(repeats, dim=0)
    return _exchange(states.unflatten(0, (size, -1)), group).transpose(0, 1).flatten(1, 2)


def gather_heads(states: Tensor, group: ProcessGroup) -> Tensor:
    """Invert :func:`split_heads`: convert [H / G, T, D] back to [H, t, D]."""
    return _exchange(states.unflatten(1, (group.size(), -1)).transpose(0, 1), group).flatten(0, 1)


def gather_tokens(values: Tensor, group: ProcessGroup) -> Tensor:
    """Concatenate the tensors [t, ...] of all workers into a tensor [T, ...] on each worker.

    In the backward pass, each worker keeps its slice of the gradient without a reduction. All workers must therefore
    compute the same loss from the result.
    """
    parts = [torch.empty_like(values) for _ in range(group.size())]
    dist.all_gather(parts, values.detach().contiguous(), group=group)
    parts[group.rank()] = values
    return torch.cat(parts)


def _exchange(parts: Tensor, group: ProcessGroup) -> Tensor:
    """Send ``parts[g]`` to worker g and return the received parts in rank order. Differentiable."""
    parts = parts.contiguous()
    received: Tensor = all_to_all_single(torch.empty_like(parts), parts, group=group)
    return received
