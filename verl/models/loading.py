"""Loads language models and value models and shards their parameters.

Only rank 0 reads the checkpoint. All other ranks build the model on the meta device and receive each parameter by
broadcast, so all machines have the same weights. Rank 0 reads the parameters one by one from the files, stacking the
experts of each layer. If ``transformers`` must convert or create parameters (such as a new head), rank 0 temporarily
keeps the whole model in float32.
"""

from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, PreTrainedModel
from transformers.integrations.liger import apply_liger_kernel

from verl.config.common import ModelConfig
from verl.config.errors import ConfigError
from verl.models.attention import attention_name
from verl.models.fsdp import shard_model, sharding_mesh
from verl.models.hub import local_folder
from verl.models.huggingface import names_and_stacks
from verl.models.info import VALUE_HEAD, ModelInfo
from verl.models.lora import add_adapters, base_parameter_name, is_adapter
from verl.models.offload import local_part, require_loaded, reshard
from verl.models.onednn import multiply_by_onednn

MAX_REPLICATED = 50_000_000
"""By default, models of up to this many parameters are replicated instead of sharded (``fsdp_size``)."""


def load_sharded_model(
    config: ModelConfig, mesh: DeviceMesh, trainable: bool, source: PreTrainedModel | None = None
) -> PreTrainedModel:
    """Load a causal language model and shard its parameters over the workers of ``mesh``.

    Trainable parameters are kept in float32, and frozen ones in ``config.param_dtype``.

    Args:
        mesh: one-dimensional mesh of all workers.
        trainable: whether to train the model. If ``config.lora`` is set, only the adapters added to it are trained.
        source: model to copy the weights from, loaded from the same folder with the same sharding.
    """

    def build(device: str) -> Any:
        return AutoModelForCausalLM.from_pretrained(config.path, **pretrained_options(config, device))

    return load_and_shard(build, config, mesh, trainable, source)


def load_sharded_value_model(config: ModelConfig, mesh: DeviceMesh, trainable: bool) -> PreTrainedModel:
    """Load a transformer with a head named ``score`` and shard it as :func:`load_sharded_model` does.

    A trainable model may start from a checkpoint without a head, such as a language model. The new head is initialized
    to 0. Raises ``ConfigError`` if weights of the body are missing. A frozen model must also have a head with one
    output and no unexpected weights.
    """
    return load_and_shard(partial(_read_value_model, config, trainable), config, mesh, trainable)


def _read_value_model(config: ModelConfig, trainable: bool, device: str) -> PreTrainedModel:
    model: PreTrainedModel
    options = pretrained_options(config, device)
    options["config"].num_labels = 1
    verbosity = transformers.logging.get_verbosity()
    # Silence warnings about missing weights, which are checked below.
    transformers.logging.set_verbosity_error()
    try:
        model, loading = AutoModelForTokenClassification.from_pretrained(
            config.path, output_loading_info=True, ignore_mismatched_sizes=True, **options
        )
    finally:
        transformers.logging.set_verbosity(verbosity)
    missing = sorted({*loading["missing_keys"], *(entry[0] for entry in loading["mismatched_keys"])})
    if body := [name for name in missing if not name.startswith(f"{VALUE_HEAD}.")]:
        # The option that sets a reward model's path differs between training and evaluation.
        which = f"critic.model.path={config.path!r}" if trainable else f"the reward model {config.path!r}"
        raise ConfigError(
            f"{which}: its files lack weights of {type(model).__name__}: {', '.join(body)}; name a complete model"
        )
    if not trainable:
        unknown = sorted(name for name in loading["unexpected_keys"] if not name.startswith("lm_head."))
        if f"{VALUE_HEAD}.weight" in missing or unknown:
            reason = f"has further weights {unknown}" if unknown else "has no head with one output"
            raise ConfigError(
                f"the reward model {config.path!r}: {reason}; name a model that was saved by "
                "AutoModelForSequenceClassification with num_labels=1"
            )
    with torch.no_grad():
        # Undo the random initialization by transformers, so that all values are 0 before training.
        for name in missing:
            model.get_parameter(name).zero_()
    return model


def pretrained_options(config: ModelConfig, device: str) -> dict[str, Any]:
    """Return the arguments of ``from_pretrained`` for a float32 model on ``device`` (``meta`` or ``cpu``)."""
    options = {
        "config": deepcopy(ModelInfo.of(config).config),
        "dtype": torch.float32,
        "attn_implementation": attention_name(config),
        "trust_remote_code": config.trust_remote_code,
    }
    return options | ({"device_map": "meta"} if device == "meta" else {})


def load_and_shard(
    build: Callable[[str], PreTrainedModel],
    config: ModelConfig,
    mesh: DeviceMesh,
    trainable: bool,
    source: PreTrainedModel | None = None,
) -> PreTrainedModel:
    """Load and shard the model that ``build`` creates on ``meta`` or ``cpu``; see :func:`load_sharded_model`."""

    def build_base(device: str) -> PreTrainedModel:
        model = build(device)
        if config.use_liger:
            # Training computes its own losses, so liger's are not needed.
            apply_liger_kernel(model, {"cross_entropy": False, "fused_linear_cross_entropy": False})
        return model

    # 1. Download the model before all ranks read its config concurrently, and build it on the meta device.
    local_folder(config.path)
    is_reader, has_adapters = dist.get_rank() == 0 and source is None, trainable and config.trains_adapters
    model = build_base("meta")
    values = tensors_in_files(model, config.path) if is_reader else None
    if has_adapters:
        add_adapters(model, config)
    if mesh.device_type == "cpu":
        multiply_by_onednn(model)
    # 2. If some parameter cannot be read individually, load the whole model on rank 0.
    if is_reader and values is None:
        whole = build_base("cpu")
        if has_adapters:
            add_adapters(whole, config)
        values = dict(_named_tensors(whole)).pop
        del whole
    elif values is not None and has_adapters:
        values = _with_adapters(values, build_base("meta"), config)
    # 3. Shard the model and fill its shards.
    copy_size = config.fsdp.fsdp_size
    if copy_size is None:
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        copy_size = 1 if num_parameters <= MAX_REPLICATED else -1
    shard_model(model, config, sharding_mesh(mesh, copy_size), trainable)
    if source is None:
        _broadcast(model, values, mesh.device_type)
    else:
        _copy(model, source, mesh.device_type)
    # Disable dropout: repeated forward passes of a policy must give the same log-probabilities.
    model.eval()
    return model


def tensors_in_files(model: PreTrainedModel, path: str) -> Callable[[str], Tensor] | None:
    """Return a function that reads a parameter of ``model`` by name from the safetensors files in ``path``.

    Stacked expert weights are assembled from each expert's weights. Rotary embedding buffers are recomputed. Returns
    None if a tensor is missing from the files or has a different shape there. ``model`` must be on the meta device.
    """
    files: dict[str, tuple[Path, tuple[int, ...]]] = {}
    for file in sorted(Path(local_folder(path)).glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            files |= {name: (file, tuple(tensors.get_slice(name).get_shape())) for name in tensors.keys()}  # noqa: SIM118
    computed: dict[str, Tensor] = {}
    for path_in_model, module in model.named_modules():
        if type(module).__name__.endswith("RotaryEmbedding") and hasattr(module, "config"):
            fresh: nn.Module = type(module)(module.config)
            computed |= {f"{path_in_model}.{name}": buffer for name, buffer in fresh.named_buffers(recurse=False)}
    shapes = {name: tuple(value.shape) for name, value in _named_tensors(model) if name not in computed}
    renamed, stacks = names_and_stacks(model, shapes)
    # 1. List the tensors in the files that make up each parameter: the first matrices of all experts, then the second.
    parts = {
        name: [pattern.replace("*", str(i)) for pattern in stacks[name] for i in range(shape[0])]
        if name in stacks
        else [renamed[name]]
        for name, shape in shapes.items()
    }
    for name, shape in shapes.items():
        part_shape = (shape[1] // len(stacks[name]), *shape[2:]) if name in stacks else shape
        if any(files.get(part, (None, None))[1] != part_shape for part in parts[name]):
            return None

    # 2. Read parameters on demand, opening each file once.
    def read(name: str) -> Tensor:
        if name in computed:
            return computed[name]
        result: Tensor | None = None
        for file, group in groupby(enumerate(parts[name]), key=lambda part: files[part[1]][0]):
            with safe_open(file, framework="pt") as tensors:
                for index, part in group:
                    value: Tensor = tensors.get_tensor(part)
                    if name not in stacks:
                        return value
                    result = value.new_empty(shapes[name]) if result is None else result
                    half, expert = divmod(index, len(result))
                    result[expert, half * len(value) : (half + 1) * len(value)] = value
        assert result is not None, name
        return result

    return read


def _with_adapters(
    values: Callable[[str], Tensor], base: PreTrainedModel, config: ModelConfig
) -> Callable[[str], Tensor]:
    """Extend ``values`` with initialized adapters. Modifies ``base``, which must be on the meta device."""
    # Expanded zeros have the right shape and device but take no memory.
    base._apply(lambda weight: torch.zeros((), dtype=weight.dtype).expand(weight.shape))
    add_adapters(base, config)
    parameters = dict(base.named_parameters())
    return lambda name: parameters[name] if is_adapter(name) else values(base_parameter_name(name))


@torch.no_grad()
def _broadcast(model: nn.Module, values: Callable[[str], Tensor] | None, device: str) -> None:
    """Move ``model`` from the meta device to ``device`` and broadcast rank 0's ``values``, reading each value once."""
    model.to_empty(device=device)
    for name, target in _named_tensors(model):
        if dist.get_rank() == 0:
            assert values is not None
            value = values(name).detach().to(device, target.dtype).contiguous()
        else:
            value = torch.empty(target.shape, dtype=target.dtype, device=device)
        dist.broadcast(value, src=0)
        if isinstance(target, DTensor):
            # Every rank has the full tensor and can slice it without communication.
            value = distribute_tensor(value, target.device_mesh, target.placements, src_data_rank=None)
        target.copy_(value)


@torch.no_grad()
def _copy(model: nn.Module, source: PreTrainedModel, device: str) -> None:
    """Move ``model`` from the meta device to ``device`` by copying this rank's shards of ``source``."""
    reshard(source)
    require_loaded(source.parameters())
    model.to_empty(device=device)
    values = dict(_named_tensors(source))
    for name, target in _named_tensors(model):
        local_part(target).copy_(local_part(values[name]))


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return chain(model.named_parameters(), model.named_buffers())
