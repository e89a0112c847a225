"""Checkpoints of veRL: its FSDP shards, merged into a model as ``transformers`` and vLLM load it.

``global_step_N/actor/`` of veRL holds ``model_world_size_<W>_rank_<R>.pt``, a state dict for each worker, and in
``huggingface/`` configurations and tokenizer. The shards are pickles: only tensors are read from them.
"""

import re
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel

from verl.config.errors import ConfigError
from verl.models.huggingface import empty_model, saved_buffers
from verl.models.info import ModelInfo

SHARD = re.compile(r"model_world_size_([1-9]\d*)_rank_(\d+)\.pt")


def holds_verl_shards(folder: Path) -> bool:
    """Whether the folder has FSDP shards of veRL."""
    return any(SHARD.fullmatch(path.name) for path in folder.glob("model_world_size_*.pt"))


def merge_verl_shards(folder: Path, trust_remote_code: bool) -> tuple[PreTrainedModel, dict[str, Tensor]]:
    """The architecture on the meta device, and the parameters by name in bfloat16, as veRL's own merger has them.

    Args:
        folder: ``.../global_step_N/actor``, or the critic's.

    Raises:
        ConfigError: shards are missing, hold something else than tensors, or are not those of the architecture.
    """
    states = [_read(path, folder) for path in _shard_paths(folder)]
    info = ModelInfo.read(str(folder / "huggingface"), trust_remote_code)
    classes = getattr(info.config, "architectures", None) or [""]
    part = "critic" if "ForTokenClassification" in classes[0] else "actor"
    model = empty_model(part, info)
    model.to(torch.bfloat16)  # type: ignore[arg-type]  # transformers wraps nn.Module.to
    model.config.dtype = torch.bfloat16
    expected = dict(model.named_parameters()) | saved_buffers(model)
    missing = [name for state in states for name in expected if name not in state]
    if missing:
        raise ConfigError(f"{folder}: has no {missing[0]}, or under another name (adapters?); {_elsewhere(folder)}")
    weights = {}
    for name, tensor in expected.items():
        parts, dim = _parts([state[name] for state in states], tensor.shape)
        if not _add_up(parts, dim, tensor.shape):
            shapes = f"{[list(part.shape) for part in parts[:2]]}, where huggingface/config.json asks for"
            raise ConfigError(f"{folder}: {name} is in parts {shapes} {list(tensor.shape)}; {_elsewhere(folder)}")
        weights[name] = (parts[0] if dim is None else torch.cat(parts, dim)).to(torch.bfloat16)
    return model, weights


def _shard_paths(folder: Path) -> list[Path]:
    """The shards of one checkpoint in rank order."""
    shards = [match for path in folder.iterdir() if (match := SHARD.fullmatch(path.name))]
    sizes = sorted({int(match[1]) for match in shards})
    if len(sizes) != 1:
        raise ConfigError(f"{folder}: has shards of {sizes} workers; leave those of one checkpoint there")
    ranks = {int(match[2]) for match in shards}
    for rank in range(sizes[0]):  # a hostile name may tell of any number of workers
        path = folder / f"model_world_size_{sizes[0]}_rank_{rank}.pt"
        if rank not in ranks or not path.is_file():
            raise ConfigError(f"{path}: is missing; each of the {sizes[0]} workers saved one, copy all of them here")
    return [folder / f"model_world_size_{sizes[0]}_rank_{rank}.pt" for rank in range(sizes[0])]


def _read(path: Path, folder: Path) -> dict[str, Tensor]:
    try:
        # Mapped, so that the shards of a large model are read one tensor at a time.
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # a damaged pickle raises whatever its bytes happen to mean
        raise ConfigError(f"{path}: is damaged, or holds more than tensors; {_elsewhere(folder)}") from error
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise ConfigError(f"{path}: is not a state dict of tensors; {_elsewhere(folder)}")
    return state


def _parts(saved: Sequence[Tensor], shape: torch.Size) -> tuple[list[Tensor], int | None]:
    """The workers' parts of a tensor, and the dimension along which it was cut; None if the first part is all of it.

    Copies of other replicas come later and are not needed. The metadata are the file's, and may be anything.
    """
    first = saved[0]
    if not isinstance(first, DTensor):
        return list(saved), None if first.shape == shape else 0
    if not first.placements or not first.device_mesh.mesh.dim():
        return [first._local_tensor], None
    placement, count = first.placements[-1], first.device_mesh.mesh.shape[-1]
    parts = [part._local_tensor if isinstance(part, DTensor) else part for part in saved[:count]]
    return parts, placement.dim if isinstance(placement, Shard) else None


def _add_up(parts: Sequence[Tensor], dim: int | None, shape: torch.Size) -> bool:
    """Whether ``parts`` are numbers that make up a tensor of this shape; nothing is allocated to find out."""
    parts = parts[:1] if dim is None else parts
    if any(isinstance(p, DTensor) or p.is_meta or p.layout != torch.strided or p.is_quantized for p in parts):
        return False
    try:
        return (parts[0] if dim is None else torch.cat([part.to("meta") for part in parts], dim)).shape == shape
    except (RuntimeError, IndexError):  # the parts have different shapes, or no such dimension
        return False


def _elsewhere(folder: Path) -> str:
    return (
        f"merge it where veRL is installed, `python -m verl.model_merger merge --backend fsdp --local_dir {folder} "
        "--target_dir merged`, and set model.path=merged"
    )
