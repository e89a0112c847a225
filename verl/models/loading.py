"""Loading causal language models onto shards, and checking their options before that.

Only the first rank of each machine reads a checkpoint. The others build the model on the meta device and get their
shards by broadcast, parameter by parameter, so that a machine's memory holds a model once and not once per worker.
"""

import hashlib
import socket
from collections.abc import Callable, Iterator
from copy import deepcopy
from importlib.util import find_spec
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PreTrainedModel
from transformers.integrations.liger import apply_liger_kernel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from verl.config.common import ModelConfig
from verl.config.errors import ConfigError
from verl.models.attention import attention_name
from verl.models.files import check_weights
from verl.models.fsdp import decoder_layers, reshard, shard_model, sharding_mesh
from verl.models.hub import local_folder
from verl.models.info import ModelInfo
from verl.models.lora import adapter_options, add_adapters
from verl.models.offload import local_part, require_loaded
from verl.models.onednn import multiply_by_onednn
from verl.models.packing import check_packing
from verl.utils.distributed import Machine, this_machine

MODALITIES = ("vision_config", "audio_config", "video_config")
"""Parts of the config of a model that reads more than text."""

SMALL = 50_000_000
"""Parameters of a model up to which each worker has its own copy unless ``fsdp_size`` says otherwise."""

GPU_PACKAGES = {
    "flash_attention_2": ("flash_attn", "flash-attn", "`pip install flash-attn`"),
    "flash_attention_3": (
        "flash_attn_interface",
        "flash-attn-3",
        "build it from https://github.com/Dao-AILab/flash-attention, folder hopper",
    ),
    "liger": ("liger_kernel", "liger-kernel", "`pip install liger-kernel`"),
}
"""What runs on GPUs only -> the module that it needs, the package that has it, and how that is installed."""


def load_sharded_model(
    config: ModelConfig, mesh: DeviceMesh, trainable: bool, source: PreTrainedModel | None = None
) -> PreTrainedModel:
    """Load a causal language model and shard its parameters over the workers of ``mesh``.

    What learns is held in float32, the rest in ``config.param_dtype``.

    Args:
        mesh: all workers, one-dimensional.
        trainable: whether it learns: all of it, or with ``config.lora`` the adapters that it then gets.
        source: a model of the same folder, sharded in the same way, whose weights are copied instead of read.
    """

    def build(device: str) -> Any:
        return AutoModelForCausalLM.from_pretrained(config.path, **pretrained_options(config, device))

    return load_and_shard(build, config, mesh, trainable, source)


def pretrained_options(config: ModelConfig, device: str) -> dict[str, Any]:
    """Arguments of ``from_pretrained`` for a model in float32 on ``device``, ``meta`` or ``cpu``."""
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
    """Shard the model that ``build`` makes on the device it is given, ``meta`` or ``cpu``; ``source`` as above."""

    def build_complete(device: str) -> PreTrainedModel:
        model = build(device)
        if config.use_liger:
            # The losses are our own; what is left are norms, rotary embedding and gated linear units.
            apply_liger_kernel(model, {"cross_entropy": False, "fused_linear_cross_entropy": False})
        if trainable and config.trains_adapters:
            add_adapters(model, config)
        return model

    # Before all ranks read the config at once.
    local_folder(config.path)
    model = build_complete("meta")
    if mesh.device_type == "cpu":
        multiply_by_onednn(model)
    machine = this_machine()
    reads = dist.get_rank() == machine.leader and source is None
    state = dict(_named_tensors(build_complete("cpu"))) if reads else {}
    if machine.group is not None and source is None:
        _check_same_weights(state if reads else None, config.path)
    shard_model(model, config, sharding_mesh(mesh, _copy_size(config, model)), trainable)
    if source is None:
        _broadcast(model, state, machine, mesh.device_type)
    else:
        _copy(model, source, mesh.device_type)
    # Dropout would make log-probabilities of one policy differ between two forward passes.
    model.eval()
    return model


def _copy_size(config: ModelConfig, model: nn.Module) -> int:
    """Workers that share one copy of ``model``; -1: all."""
    if config.fsdp.fsdp_size is not None:
        return config.fsdp.fsdp_size
    return 1 if sum(parameter.numel() for parameter in model.parameters()) <= SMALL else -1


def _check_same_weights(state: dict[str, Tensor] | None, path: str) -> None:
    """Raise ``ConfigError`` on all ranks unless those that give a ``state`` give the same."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, None if state is None else (socket.gethostname(), _fingerprint(state)))
    (first, expected), *others = [pair for pair in found if pair is not None]
    differing = [host for host, fingerprint in others if fingerprint != expected]
    if differing:
        raise ConfigError(
            f"{path!r}: the files on {', '.join(differing)} hold other weights than those on {first}; every machine "
            "needs the same model under this path"
        )


def _fingerprint(state: dict[str, Tensor]) -> str:
    """Differs, but for rare chance, where names, shapes or values do."""
    digest = hashlib.sha256()
    for name, value in state.items():
        words = value.detach().contiguous().view(-1)
        words = words.view(torch.int32 if words.element_size() % 4 == 0 else torch.uint8)
        digest.update(f"{name} {tuple(value.shape)} {int(words.sum(dtype=torch.int64))}\n".encode())
    return digest.hexdigest()


@torch.no_grad()
def _broadcast(model: nn.Module, state: dict[str, Tensor], machine: Machine, device: str) -> None:
    """Move ``model`` from the meta device to ``device`` with the values in the leader's ``state``, which is used up."""
    model.to_empty(device=device)
    for name, target in _named_tensors(model):
        if dist.get_rank() == machine.leader:
            value = state.pop(name).detach().to(device, target.dtype).contiguous()
        else:
            value = torch.empty(target.shape, dtype=target.dtype, device=device)
        dist.broadcast(value, src=machine.leader, group=machine.group)
        if isinstance(target, DTensor):
            # Every rank has the full tensor, and cuts its own part out without asking the others.
            value = distribute_tensor(value, target.device_mesh, target.placements, src_data_rank=None)
        target.copy_(value)


@torch.no_grad()
def _copy(model: nn.Module, source: PreTrainedModel, device: str) -> None:
    """Move ``model`` from the meta device to ``device`` with the values of ``source``, each rank its own shards."""
    reshard(source)
    require_loaded(source.parameters())
    model.to_empty(device=device)
    values = dict(_named_tensors(source))
    for name, target in _named_tensors(model):
        local_part(target).copy_(local_part(values[name]))


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return chain(model.named_parameters(), model.named_buffers())


def check_model(config: ModelConfig, prefix: str, device_type: str) -> None:
    """Raise ``ConfigError`` if a package is missing or the model does not support one of its options.

    Args:
        prefix: where the options stand in the whole config, such as ``critic.model``.
        device_type: ``cpu`` or ``cuda``.
    """
    info = ModelInfo.of(config)
    _check_text_model(config, info, prefix)
    check_weights(info, f"{prefix}.path={config.path!r}")
    _check_attention(config, info, prefix, device_type)
    if config.use_liger:
        field, kind = f"{prefix}.use_liger=True", info.config.model_type
        _require_gpu_package(field, "liger", device_type, "false")
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

        if kind not in MODEL_TYPE_TO_APPLY_LIGER_FN:
            raise ConfigError(f"{field}: liger-kernel has no kernels for {kind}; set it to false")
    check_packing(config, prefix)
    if config.gradient_checkpointing and not decoder_layers(info.causal_model):
        raise ConfigError(
            f"{prefix}.gradient_checkpointing=True: {type(info.causal_model).__name__} does not name its layers "
            "(_no_split_modules); set it to false"
        )
    if config.trains_adapters:
        adapter_options(info.causal_model, config, prefix)


def _check_text_model(config: ModelConfig, info: ModelInfo, prefix: str) -> None:
    field, kind = f"{prefix}.path={config.path!r}", info.config.model_type
    further = [name.removesuffix("_config") for name in MODALITIES if getattr(info.config, name, None) is not None]
    if further:
        raise ConfigError(
            f"{field}: {kind} is a multimodal checkpoint (text and {', '.join(further)}), and only text models are "
            "trained, sampled and measured; name a text model, or save the language model inside it by itself"
        )
    # A critic or reward model is checked by its own form, see check_value_architecture.
    own_code = "AutoModelForCausalLM" in (getattr(info.config, "auto_map", None) or {})
    if prefix == "model" and type(info.config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not own_code:
        raise ConfigError(f"{field}: {kind} is not a causal language model in transformers; name one")


def _check_attention(config: ModelConfig, info: ModelInfo, prefix: str, device_type: str) -> None:
    field = f"{prefix}.attn_implementation={config.attn_implementation!r}"
    _check_attention_name(config.attn_implementation, info, field, device_type)
    if config.attn_implementation in GPU_PACKAGES:
        _require_gpu_package(field, config.attn_implementation, device_type, "sdpa")
        if config.param_dtype == "float32":
            raise ConfigError(f"{field}: does not support float32; set {prefix}.param_dtype=bfloat16")
    cap = getattr(info.text_config, "attn_logit_softcapping", None)
    # sdpa ignores a cap on attention scores silently: it would compute another model.
    if cap is not None and config.attn_implementation == "sdpa":
        raise ConfigError(
            f"{field}: does not support the soft cap on attention scores of {info.text_config.model_type} "
            f"(attn_logit_softcapping={cap:g}); set it to eager or flash_attention_2"
        )


def _check_attention_name(name: str, info: ModelInfo, field: str, device_type: str) -> None:
    """Raise ``ConfigError`` unless ``transformers`` has attention of this name, for this model and device."""
    known = [key for key in ALL_ATTENTION_FUNCTIONS.valid_keys() if "|" not in key and not key.startswith("packed_")]
    # A kernel of the hub is named owner/name.
    if not ("/" in name and find_spec("kernels") is not None) and name not in [*known, "eager"]:
        raise ConfigError(f"{field}: transformers has no such attention; set it to one of eager, {', '.join(known)}")
    if device_type != "cuda" and (name.startswith("flash") or "/" in name):
        raise ConfigError(f"{field}: runs on GPUs only; set it to sdpa")
    attribute = {"sdpa": "_supports_sdpa", "flex_attention": "_supports_flex_attn"}.get(name)
    if attribute and type(info.config) in MODEL_FOR_CAUSAL_LM_MAPPING and not getattr(info.causal_model, attribute):
        raise ConfigError(f"{field}: {info.config.model_type} does not support it; set it to eager")


def _require_gpu_package(field: str, name: str, device_type: str, otherwise: str) -> None:
    """``otherwise``: the value of ``field`` that does not need the package."""
    module, package, how = GPU_PACKAGES[name]
    if device_type != "cuda":
        raise ConfigError(f"{field}: runs on GPUs only; set it to {otherwise}")
    if find_spec(module) is None:
        raise ConfigError(f"{field}: {package} is not installed; {how}, or set it to {otherwise}")
