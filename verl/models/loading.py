"""Weights on their way from disk into a sharded model, and from there to others.

Rank 0 alone reads a checkpoint; the other ranks build the model without memory behind it, and get their shards by
broadcast, parameter by parameter. So the host's memory holds a model once, and not once per worker.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    rename_source_key,
    revert_weight_conversion,
)

from verl.models.offload import is_away, local_part

State = dict[str, Tensor]


def read_once(build: Callable[[str], PreTrainedModel]) -> tuple[PreTrainedModel, State]:
    """A model on the ``meta`` device, and on rank 0 the values of its parameters and buffers by name.

    Args:
        build: makes the model on the device it is given, ``meta`` or ``cpu``.
    """
    model = build("meta")
    return model, dict(_named_tensors(build("cpu"))) if dist.get_rank() == 0 else {}


@torch.no_grad()
def fill(model: nn.Module, state: State, device: str) -> None:
    """Move ``model`` from ``meta`` to ``device`` with the values that rank 0 has in ``state``, which is used up."""
    model.to_empty(device=device)
    for name, target in _named_tensors(model):
        if dist.get_rank() == 0:
            value = state.pop(name).detach().to(device).contiguous()
        else:
            value = torch.empty(target.shape, dtype=target.dtype, device=device)
        dist.broadcast(value, src=0)
        if isinstance(target, DTensor):
            # Every rank has the whole, and cuts its own part out without asking the others.
            value = distribute_tensor(value, target.device_mesh, target.placements, src_data_rank=None)
        target.copy_(value)


def whole(tensor: Tensor) -> Tensor:
    """A tensor gathered from all ranks, without a gradient; all must ask for it together.

    Raises:
        RuntimeError: it is offloaded to the host just now.
    """
    if is_away(tensor):
        raise RuntimeError("the model is offloaded to the host's memory; use it inside `with ....loaded():`")
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else local_part(tensor)


def as_in_files(
    model: nn.Module, names: Iterable[str], weights: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """``weights`` as the model's files have them, which ``transformers`` may have renamed, joined or cut on loading.

    What was cut from one tensor is kept until the last part comes; anything else goes out at once.

    Args:
        model: loaded by ``from_pretrained``, which notes there what it converted.
        names: of all ``weights``, and perhaps more.
        weights: whole tensors by their name in ``model``.
    """
    conversions = [conversion.reverse_transform() for conversion in reversed(model._weight_conversions)]
    renamings = [conversion for conversion in conversions if isinstance(conversion, WeightRenaming)]
    converters = [conversion for conversion in conversions if isinstance(conversion, WeightConverter)]
    target = {name: rename_source_key(name, renamings, converters, reverse=True)[0] for name in names}
    num_parts = Counter(target.values())
    held: dict[str, State] = defaultdict(dict)
    for name, value in weights:
        parts = held[target[name]]
        parts[name] = value
        if len(parts) == num_parts[target[name]]:
            yield from revert_weight_conversion(model, held.pop(target[name])).items()
        # Not to be here still while the next one is gathered.
        del value, parts


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return chain(model.named_parameters(), model.named_buffers())
