"""FSDP2 sharding and bucketed gathering of full parameters.

Shapes: W ranks that shard one replica of the model.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from verl.config.common import ModelConfig
from verl.models.info import VALUE_HEAD
from verl.models.lora import adapter_of, base_parameter_name, is_adapted, is_adapter, merged_weight, train_adapters_only
from verl.models.offload import Offloaded, local_part, require_loaded, reshard
from verl.utils.distributed import collective_timeout

WeightDtype = Callable[[str, Tensor], torch.dtype]
"""f(parameter name, value) -> dtype in which the parameter is sent."""


def keep_dtype(name: str, value: Tensor) -> torch.dtype:
    """Return the parameter's dtype. Implements :data:`WeightDtype`."""
    return value.dtype


@dataclass(frozen=True)
class EngineDtype:
    """A :data:`WeightDtype` that casts weights to the engine's dtype if that is narrower.

    Only matrices are cast. Vectors are small, and some of them, such as state-space parameters, are used in higher
    precision.
    """

    dtype: torch.dtype
    exact: frozenset[str]
    """Suffixes (:func:`name_tail`) of parameters that the engine keeps in higher precision, such as MoE routers."""

    def __call__(self, name: str, value: Tensor) -> torch.dtype:
        is_matrix = value.dim() > 2 or (value.dim() == 2 and name.endswith(".weight"))
        narrower = self.dtype.itemsize < value.dtype.itemsize
        return self.dtype if is_matrix and narrower and name_tail(name) not in self.exact else value.dtype


def name_tail(name: str) -> str:
    """Return the last two parts of a parameter's name, which are the same in the engine and in checkpoint files."""
    return ".".join(name.split(".")[-2:])


ALIGNMENT = 16
"""Alignment in bytes of the shards in a bucket, so that each shard can be viewed as a tensor of its dtype."""

# Newer torch versions use a different name for this function.
all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


@cache
def sharding_mesh(mesh: DeviceMesh, fsdp_size: int) -> DeviceMesh:
    """Return the mesh for :func:`fully_shard`: ``mesh`` itself, or a 2D mesh [replicas, shards per replica].

    Neighbouring ranks, which have the fastest links, shard the same replica. Models with the same ``fsdp_size`` share a
    mesh, because each mesh's communicators use GPU memory.

    Args:
        mesh: one-dimensional mesh of all workers.
        fsdp_size: number of workers that shard one replica, or -1 for all workers.
    """
    if fsdp_size in (-1, mesh.size()):
        return mesh
    # Create the groups explicitly, because init_device_mesh would use torch's default timeout.
    ranks, limit = torch.arange(mesh.size()).view(-1, fsdp_size), collective_timeout()
    replicate, _ = dist.new_subgroups_by_enumeration(ranks.T.tolist(), timeout=limit)
    shard, _ = dist.new_subgroups_by_enumeration(ranks.tolist(), timeout=limit)
    groups = [replicate, shard]
    return DeviceMesh.from_group(groups, mesh.device_type, ranks, mesh_dim_names=("replicate", "shard"))


def shard_model(model: PreTrainedModel, config: ModelConfig, mesh: DeviceMesh, trainable: bool) -> None:
    """Shard ``model`` in place over ``mesh`` from :func:`sharding_mesh`. Frozen weights are kept in ``param_dtype``.

    Each decoder layer is an FSDP unit. Peak memory therefore includes the embedding, the head, and the full parameters
    of one layer.
    """
    model.requires_grad_(trainable)
    if any(is_adapter(name) for name, _ in model.named_parameters()):
        train_adapters_only(model)
    # Casting frozen weights halves their memory without changing results, since matrix products cast them anyway. The
    # head of a value model is excluded because it computes in float32.
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad and not name.startswith(f"{VALUE_HEAD}."):
            parameter.data = parameter.data.to(getattr(torch, config.param_dtype))
    if hasattr(model, VALUE_HEAD):
        # Small differences between values matter, so the head computes in float32.
        exact = MixedPrecisionPolicy(param_dtype=torch.float32)
        fully_shard(model.get_submodule(VALUE_HEAD), mesh=mesh, mp_policy=exact)
    # Gradients are always reduced in float32.
    policy = MixedPrecisionPolicy(param_dtype=getattr(torch, config.param_dtype), reduce_dtype=torch.float32)
    for layer in decoder_layers(model):
        if trainable and config.gradient_checkpointing:
            # In evaluation mode, transformers disables its own checkpointing. Only adapter dropout depends on the
            # random state.
            has_dropout = config.trains_adapters and config.lora.dropout > 0
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=has_dropout)
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    # The backward pass starts at the head, so the head of a trainable model stays unsharded.
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=not trainable)


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the decoder layers, which ``transformers`` lists in ``_no_split_modules``."""
    names = set(model._no_split_modules or [])
    return [module for module in model.modules() if type(module).__name__ in names]


def offloaded_parameters(model: nn.Module, enabled: bool) -> Offloaded:
    """Return an :class:`Offloaded` that manages the parameters of a sharded model."""

    def tensors() -> list[nn.Parameter]:
        reshard(model)
        return list(model.parameters())

    if enabled:
        model.register_forward_pre_hook(lambda *_: require_loaded(model.parameters()), prepend=True)
    return Offloaded(tensors, enabled, constant=not any(p.requires_grad for p in model.parameters()))


@contextmanager
def keep_unsharded(model: PreTrainedModel) -> Iterator[None]:
    """Keep a trainable model's full parameters in ``param_dtype`` inside the block. All ranks must enter it together.

    Forward passes inside the block run without gradients or communication, so ranks may run different numbers of them.
    """
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for unit in units:
        unit.set_reshard_after_forward(False, recurse=False)
        unit.unshard()
    try:
        yield
    finally:
        for unit in units:
            # As in shard_model, only the root stays unsharded between forward and backward.
            unit.set_reshard_after_forward(unit is not units[0], recurse=False)
            unit.reshard()


def full_parameters(
    model: nn.Module, dtype: WeightDtype = keep_dtype, bucket_bytes: int = 0
) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and full value of each parameter (:func:`gather_parameters`), with adapters merged in float32."""
    reshard(model)
    require_loaded(model.parameters())
    # Both factors of an adapter are yielded before its weight.
    weights = [named for named in model.named_parameters() if not is_adapter(named[0])]
    parts = (part for named in weights for part in (*adapter_of(model, named[0]), named))

    def sent_dtype(name: str, value: Tensor) -> torch.dtype:
        return value.dtype if is_adapter(name) or is_adapted(name) else dtype(base_parameter_name(name), value)

    factors: list[Tensor] = []
    for name, value in gather_parameters(parts, sent_dtype, bucket_bytes):
        if is_adapter(name):
            factors.append(value)
            continue
        if factors:
            value = merged_weight(model, name, value, *factors)
            factors.clear()
        value = value.to(dtype(base_parameter_name(name), value))
        yield base_parameter_name(name), value
        # Free this parameter before the next one is gathered.
        del value


class _Shard(NamedTuple):
    """Location of a parameter's shard in a bucket."""

    name: str
    tensor: DTensor
    dtype: torch.dtype
    offset: int
    """Offset of the shard within each rank's part of the bucket, in bytes."""
    num_bytes: int
    """Size of the shard in bytes, including padding."""


def gather_parameters(
    parameters: Iterable[tuple[str, Tensor]], dtype: WeightDtype, bucket_bytes: int
) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and full value of each parameter in input order. All ranks must iterate together.

    Each rank casts its shards and packs them into buckets, which are gathered with one all-gather each. Peak memory is
    one gathered bucket, this rank's part of it, and one full parameter.

    Args:
        parameters: parameters that are replicated or, as in FSDP2, sharded by rows.
        bucket_bytes: maximum size of a bucket's full parameters; a larger parameter gets its own bucket.
    """
    bucket: list[_Shard] = []
    for name, parameter in parameters:
        target = dtype(name, parameter)
        if not isinstance(parameter, DTensor) or (ranks := _shard_group(parameter).size()) == 1:
            yield from _unpacked(bucket)
            bucket = []
            yield name, local_part(parameter).to(target)
            continue
        offset = 0 if not bucket else -(-(bucket[-1].offset + bucket[-1].num_bytes) // ALIGNMENT) * ALIGNMENT
        rows = -(-parameter.shape[0] // ranks)
        num_bytes = rows * parameter.shape[1:].numel() * target.itemsize
        if bucket and (offset + num_bytes) * ranks > bucket_bytes:
            yield from _unpacked(bucket)
            bucket, offset = [], 0
        bucket.append(_Shard(name, parameter, target, offset, num_bytes))
    yield from _unpacked(bucket)


def _unpacked(bucket: list[_Shard]) -> Iterator[tuple[str, Tensor]]:
    """Gather a bucket with one collective and yield its full parameters."""
    if not bucket:
        return
    gathered = _gathered(bucket)
    for name, parameter, dtype, offset, num_bytes in bucket:
        # Concatenate the shards of all ranks. Only the last shards are padded, so all padding is at the end.
        flat = gathered[:, offset : offset + num_bytes].reshape(-1).view(dtype)
        yield name, flat.view(-1, *parameter.shape[1:])[: parameter.shape[0]]
        # Free this parameter before the next one is unpacked.
        del flat


def _gathered(bucket: list[_Shard]) -> Tensor:
    """Gather the packed shards of all ranks into one tensor, [W, bytes] uint8."""
    last, device, group = bucket[-1], local_part(bucket[0].tensor).device, _shard_group(bucket[0].tensor)
    local = torch.empty(last.offset + last.num_bytes, dtype=torch.uint8, device=device)
    for _, parameter, dtype, offset, num_bytes in bucket:
        shard = local_part(parameter).reshape(-1)
        # Cast and pack in a single copy.
        local[offset : offset + num_bytes].view(dtype)[: len(shard)].copy_(shard)
    gathered = torch.empty(group.size() * len(local), dtype=torch.uint8, device=device)
    all_gather(gathered, local, group=group)
    return gathered.view(-1, len(local))


def _shard_group(parameter: DTensor) -> dist.ProcessGroup:
    """Return the process group of the W ranks that shard a parameter (the last dimension of its mesh)."""
    *copies, last = parameter.placements
    assert last == Shard(0) and all(p.is_replicate() for p in copies), parameter.placements
    return parameter.device_mesh.get_group(len(copies))
