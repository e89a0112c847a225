"""Models sharded by FSDP2: how they are split, and how whole parameters are gathered, many of them in one collective.

Legend: W ranks that hold one copy of the model together.
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
"""The precision in which a parameter of this name and value travels."""


def keep_dtype(name: str, value: Tensor) -> torch.dtype:
    """Return the type unchanged; a :data:`WeightDtype`."""
    return value.dtype


@dataclass(frozen=True)
class EngineDtype:
    """A :data:`WeightDtype`: weights travel as an engine will hold them, where that is narrower.

    Only matrices and stacks of them are cast; vectors weigh nothing, and some, such as a state-space model's, are
    computed with before they are rounded.
    """

    dtype: torch.dtype
    exact: frozenset[str]
    """Parameters that the engine keeps in higher precision than the rest, such as the router of some mixtures, by
    :func:`name_tail`."""

    def __call__(self, name: str, value: Tensor) -> torch.dtype:
        is_matrix = value.dim() > 2 or (value.dim() == 2 and name.endswith(".weight"))
        narrower = self.dtype.itemsize < value.dtype.itemsize
        return self.dtype if is_matrix and narrower and name_tail(name) not in self.exact else value.dtype


def name_tail(name: str) -> str:
    """Return the last two parts of a parameter's name: engine and file may name the enclosing module differently."""
    return ".".join(name.split(".")[-2:])


ALIGNMENT = 16
"""Bytes to whose multiples shards start in a bucket, so that each can be read as numbers of its own type."""

# Newer versions of torch have renamed it.
all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


@cache
def sharding_mesh(mesh: DeviceMesh, fsdp_size: int) -> DeviceMesh:
    """Return the mesh over which :func:`fully_shard` spreads a model: ``mesh`` itself, or [copies, shards of a copy].

    Neighbours in rank, which the fastest links join, hold one copy together. Models with the same ``fsdp_size`` share
    one mesh, because each mesh has its own communicators, and these take GPU memory.

    Args:
        mesh: all workers, one-dimensional.
        fsdp_size: workers that hold one copy; -1: all.
    """
    if fsdp_size in (-1, mesh.size()):
        return mesh
    # init_device_mesh would make groups with torch's own time limit.
    ranks, limit = torch.arange(mesh.size()).view(-1, fsdp_size), collective_timeout()
    replicate, _ = dist.new_subgroups_by_enumeration(ranks.T.tolist(), timeout=limit)
    shard, _ = dist.new_subgroups_by_enumeration(ranks.tolist(), timeout=limit)
    groups = [replicate, shard]
    return DeviceMesh.from_group(groups, mesh.device_type, ranks, mesh_dim_names=("replicate", "shard"))


def shard_model(model: PreTrainedModel, config: ModelConfig, mesh: DeviceMesh, trainable: bool) -> None:
    """Shard ``model`` in place over ``mesh``, by :func:`sharding_mesh`; what does not learn is kept in ``param_dtype``.

    Each decoder layer is its own unit: besides the embedding and the head, only one layer's full parameters are in
    memory at a time.
    """
    model.requires_grad_(trainable)
    if any(is_adapter(name) for name, _ in model.named_parameters()):
        train_adapters_only(model)
    # In bfloat16 a frozen weight takes half the memory, and every product has the same bits: it is cast for it anyway.
    # A value model's head is not.
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad and not name.startswith(f"{VALUE_HEAD}."):
            parameter.data = parameter.data.to(getattr(torch, config.param_dtype))
    if hasattr(model, VALUE_HEAD):
        # Small differences between values matter: the head's products stay in float32.
        exact = MixedPrecisionPolicy(param_dtype=torch.float32)
        fully_shard(model.get_submodule(VALUE_HEAD), mesh=mesh, mp_policy=exact)
    # Gradients are summed in float32 whatever the precision of the products: a sum over ranks must not lose bits.
    policy = MixedPrecisionPolicy(param_dtype=getattr(torch, config.param_dtype), reduce_dtype=torch.float32)
    for layer in decoder_layers(model):
        if trainable and config.gradient_checkpointing:
            # Not by transformers' own switch, which is off in models in evaluation mode, as ours are. Only an adapter's
            # dropout draws numbers, which the backward pass must draw again.
            drops = config.trains_adapters and config.lora.dropout > 0
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=drops)
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    # A model that learns needs embedding and head again in the backward pass, which starts where the forward ends.
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=not trainable)


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the blocks that ``transformers`` keeps in one piece: the layers of the model's body."""
    names = set(model._no_split_modules or [])
    return [module for module in model.modules() if type(module).__name__ in names]


def offloaded_parameters(model: nn.Module, enabled: bool) -> Offloaded:
    """Keep a sharded model's parameters on the host except inside ``with result.loaded():``, if ``enabled``."""

    def tensors() -> list[nn.Parameter]:
        reshard(model)
        return list(model.parameters())

    if enabled:
        model.register_forward_pre_hook(lambda *_: require_loaded(model.parameters()), prepend=True)
    return Offloaded(tensors, enabled, constant=not any(p.requires_grad for p in model.parameters()))


@contextmanager
def keep_unsharded(model: PreTrainedModel) -> Iterator[None]:
    """Within the block ``model`` has its full parameters, in ``param_dtype``, which all ranks gather on entry.

    For a model that learns, without gradients. Forward passes need no communication; each rank makes as many as it
    likes, or none.
    """
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for unit in units:
        unit.set_reshard_after_forward(False, recurse=False)
        unit.unshard()
    try:
        yield
    finally:
        for unit in units:
            # As in shard_model: only the root stays unsharded between forward and backward.
            unit.set_reshard_after_forward(unit is not units[0], recurse=False)
            unit.reshard()


def full_parameters(
    model: nn.Module, dtype: WeightDtype = keep_dtype, bucket_bytes: int = 0
) -> Iterator[tuple[str, Tensor]]:
    """Every parameter by name, adapters merged, as by :func:`gather_parameters`.

    A weight with an adapter is merged in float32, and cast afterwards.
    """
    reshard(model)
    require_loaded(model.parameters())
    # The two factors of an adapter come before its weight.
    weights = [named for named in model.named_parameters() if not is_adapter(named[0])]
    parts = (part for named in weights for part in (*adapter_of(model, named[0]), named))

    def travels(name: str, value: Tensor) -> torch.dtype:
        return value.dtype if is_adapter(name) or is_adapted(name) else dtype(base_parameter_name(name), value)

    factors: list[Tensor] = []
    for name, value in gather_parameters(parts, travels, bucket_bytes):
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
    """A parameter in a bucket."""

    name: str
    tensor: DTensor
    dtype: torch.dtype
    offset: int
    """Bytes of the bucket, on each rank, before it."""
    num_bytes: int
    """Of a full shard."""


def gather_parameters(
    parameters: Iterable[tuple[str, Tensor]], dtype: WeightDtype, bucket_bytes: int
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
    device, group = local_part(first).device, _shard_group(first)
    own = torch.empty(last.offset + last.num_bytes, dtype=torch.uint8, device=device)
    for _, parameter, dtype, offset, num_bytes in bucket:
        shard = local_part(parameter).reshape(-1)
        # Casts and packs in one copy.
        own[offset : offset + num_bytes].view(dtype)[: len(shard)].copy_(shard)
    whole = torch.empty(group.size() * len(own), dtype=torch.uint8, device=device)
    all_gather(whole, own, group=group)
    return whole.view(-1, len(own))


def _shard_group(parameter: DTensor) -> dist.ProcessGroup:
    """Return the W ranks over which rows are spread: the last dimension of the mesh, after the one of copies."""
    *copies, last = parameter.placements
    assert last == Shard(0) and all(p.is_replicate() for p in copies), parameter.placements
    return parameter.device_mesh.get_group(len(copies))
