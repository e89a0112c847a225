"""Whole parameters from the shards of all ranks, many of them in one collective.

Legend: W ranks that hold one copy of the model together, N rows of a parameter, c = ceil(N / W) rows of a full shard.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from verl.models.offload import local_part

WeightDtype = Callable[[str, Tensor], torch.dtype]
"""The precision in which a parameter of this name and value travels."""

ALIGNMENT = 16
"""Bytes to whose multiples shards start in a bucket, so that each can be read as numbers of its own type."""

# Newer versions of torch have renamed it.
all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


class _Shard(NamedTuple):
    """A parameter in a bucket."""

    name: str
    tensor: DTensor
    dtype: torch.dtype
    offset: int
    """Bytes of the bucket, on each rank, before it."""
    num_bytes: int
    """Of a full shard."""


def keep_dtype(name: str, value: Tensor) -> torch.dtype:
    """The :data:`WeightDtype` that changes nothing."""
    return value.dtype


def gather_parameters(
    parameters: Iterable[tuple[str, Tensor]], dtype: WeightDtype = keep_dtype, bucket_bytes: int = 0
) -> Iterator[tuple[str, Tensor]]:
    """Whole parameters by name, in their order; all ranks must iterate over it together.

    Each rank casts its shards before they travel, and packs those of a bucket into one message. At one time there are
    this rank's part of a bucket, the whole bucket, and one parameter taken out of it. Without a second rank in the
    group there is nothing to send.

    Args:
        parameters: replicated, or sharded by rows as FSDP2 does; copies of a shard (HSDP) send nothing.
        bucket_bytes: most bytes of a bucket's whole parameters; a parameter with more has a bucket of its own.
    """
    bucket: list[_Shard] = []
    for name, parameter in parameters:
        target = dtype(name, parameter)
        if not isinstance(parameter, DTensor) or _num_shards(parameter) == 1:
            yield from _unpacked(bucket)
            bucket = []
            yield name, local_part(parameter).to(target)
            continue
        offset = 0 if not bucket else -(-(bucket[-1].offset + bucket[-1].num_bytes) // ALIGNMENT) * ALIGNMENT
        num_bytes = _full_shard_rows(parameter) * _row_numbers(parameter) * target.itemsize
        if bucket and (offset + num_bytes) * _num_shards(parameter) > bucket_bytes:
            yield from _unpacked(bucket)
            bucket, offset = [], 0
        bucket.append(_Shard(name, parameter, target, offset, num_bytes))
    yield from _unpacked(bucket)


def _unpacked(bucket: list[_Shard]) -> Iterator[tuple[str, Tensor]]:
    """One collective, and the whole parameters of a bucket."""
    if not bucket:
        return
    whole = _exchange(bucket)
    for name, parameter, dtype, offset, num_bytes in bucket:
        # The shards of all ranks, one after another. Only the last ones are short, so what fills them up is at the end.
        flat = whole[:, offset : offset + num_bytes].reshape(-1).view(dtype)
        yield name, flat.view(-1, *parameter.shape[1:])[: parameter.shape[0]]
        # Free this parameter before the next one is taken out.
        del flat


def _exchange(bucket: list[_Shard]) -> Tensor:
    """[W, bytes of a rank's part] uint8, what each rank holds of the parameters."""
    first, last = bucket[0].tensor, bucket[-1]
    device = local_part(first).device
    own = torch.empty(last.offset + last.num_bytes, dtype=torch.uint8, device=device)
    for _, parameter, dtype, offset, num_bytes in bucket:
        shard = local_part(parameter).reshape(-1)
        # Casts and packs in one copy.
        own[offset : offset + num_bytes].view(dtype)[: len(shard)].copy_(shard)
    whole = torch.empty(_num_shards(first) * len(own), dtype=torch.uint8, device=device)
    all_gather(whole, own, group=first.device_mesh.get_group(_sharded_dim(first)))
    return whole.view(-1, len(own))


def _sharded_dim(parameter: DTensor) -> int:
    """The dimension of the mesh over which the rows are spread; the last, before which there may be copies."""
    *copies, last = parameter.placements
    assert last == Shard(0) and all(p.is_replicate() for p in copies), parameter.placements
    return len(copies)


def _num_shards(parameter: DTensor) -> int:
    return parameter.device_mesh.size(_sharded_dim(parameter))


def _full_shard_rows(parameter: DTensor) -> int:
    return -(-parameter.shape[0] // _num_shards(parameter))


def _row_numbers(parameter: DTensor) -> int:
    return parameter.shape[1:].numel()
