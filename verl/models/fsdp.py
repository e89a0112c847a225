"""Models sharded by FSDP2."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from transformers import (
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    PreTrainedModel,
)
from transformers.integrations.liger import apply_liger_kernel

from verl.config.common import ModelConfig
from verl.models.attention import attention_name
from verl.models.loading import as_in_files, fill, read_once, whole
from verl.models.lora import (
    VALUE_HEAD,
    add_adapters,
    has_adapters,
    is_adapter,
    merged,
    name_without_adapters,
    save_adapters,
    train_adapters_alone,
)
from verl.models.offload import Offloaded, is_away


def load_sharded_model(config: ModelConfig, mesh: DeviceMesh, trainable: bool) -> PreTrainedModel:
    """Load a causal language model in float32 and shard its parameters over the workers of ``mesh``.

    Args:
        mesh: all workers, one-dimensional.
        trainable: whether it learns: all of it, or with ``config.lora`` the adapters that it then gets.
    """

    def build(device: str) -> PreTrainedModel:
        return AutoModelForCausalLM.from_pretrained(config.path, **_load_options(config, device))

    return _load(build, config, mesh, trainable)


def load_sharded_value_model(config: ModelConfig, mesh: DeviceMesh, trainable: bool, new_head: bool) -> PreTrainedModel:
    """Load a transformer with a head ``score`` that gives one number per token, and shard it likewise.

    Args:
        new_head: whether a checkpoint without a head will do, such as a language model; the head then starts at 0.

    Raises:
        ValueError: weights of the body are missing; or ``new_head`` is false and the checkpoint has no head, one of
            another size, or more than a head.
    """
    return _load(partial(_read_value_model, config, new_head), config, mesh, trainable)


def _read_value_model(config: ModelConfig, new_head: bool, device: str) -> PreTrainedModel:
    with _without_loading_report():
        model, loading = AutoModelForTokenClassification.from_pretrained(
            config.path,
            num_labels=1,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **_load_options(config, device),
        )
    missing = sorted({*loading["missing_keys"], *(entry[0] for entry in loading["mismatched_keys"])})
    if any(not name.startswith(f"{VALUE_HEAD}.") for name in missing):
        raise ValueError(f"{config.path}: {type(model).__name__} lacks {missing}")
    if not new_head:
        unknown = sorted(name for name in loading["unexpected_keys"] if not name.startswith("lm_head."))
        if f"{VALUE_HEAD}.weight" in missing or unknown:
            found = f"has {unknown} besides" if unknown else "holds no head with one output"
            raise ValueError(
                f"reward_model.model.path={config.path!r}: {found}; name a model that "
                "AutoModelForSequenceClassification with num_labels=1 was saved from"
            )
    with torch.no_grad():
        # Zeros rather than transformers' random numbers: no opinion before learning.
        for name in missing:
            model.get_parameter(name).zero_()
    return model


@contextmanager
def _without_loading_report() -> Iterator[None]:
    """Keep ``transformers`` from warning of missing weights, which the caller looks at itself."""
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(verbosity)


def check_value_architecture(config: ModelConfig, field: str) -> None:
    """Whether ``transformers`` has a form of this architecture that :func:`load_sharded_value_model` can hold.

    Raises:
        ValueError: it has not; the message names the config's ``field``.
    """
    architecture = AutoConfig.from_pretrained(config.path, trust_remote_code=config.trust_remote_code, num_labels=1)
    known = type(architecture) in MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING
    with torch.device("meta"):
        if known and hasattr(AutoModelForTokenClassification.from_config(architecture), VALUE_HEAD):
            return
    raise ValueError(
        f"{field}={config.path!r}: transformers has no token classification form with a head named score for "
        f"{architecture.model_type}; it has for Llama, Mistral, Qwen2, Qwen3 and Gemma2, among others"
    )


def _load_options(config: ModelConfig, device: str) -> dict[str, Any]:
    options = {
        "dtype": torch.float32,
        "attn_implementation": attention_name(config),
        "trust_remote_code": config.trust_remote_code,
    }
    return options | ({"device_map": "meta"} if device == "meta" else {})


def _load(
    build: Callable[[str], PreTrainedModel], config: ModelConfig, mesh: DeviceMesh, trainable: bool
) -> PreTrainedModel:
    def build_whole(device: str) -> PreTrainedModel:
        model = build(device)
        if config.use_liger:
            # The losses are our own; what is left are norms, rotary embedding and gated linear units.
            apply_liger_kernel(model, {"cross_entropy": False, "fused_linear_cross_entropy": False})
        if trainable and config.lora.rank:
            add_adapters(model, config.lora, config.path)
        return model

    model, state = read_once(build_whole)
    _shard(model, config, sharding_mesh(mesh, config.fsdp.fsdp_size), trainable)
    fill(model, state, mesh.device_type)
    # Dropout would make log-probabilities of one policy differ between two forward passes.
    return model.eval()


@cache
def sharding_mesh(mesh: DeviceMesh, fsdp_size: int) -> DeviceMesh:
    """The mesh over which :func:`fully_shard` spreads a model: ``mesh`` itself, or [copies, shards of a copy].

    Neighbours in rank, which the fastest links join, hold one copy together. Models with the same ``fsdp_size`` share
    one mesh, as each has communicators of its own, and these take GPU memory.

    Args:
        mesh: all workers, one-dimensional.
        fsdp_size: workers that hold one copy; -1: all.
    """
    if fsdp_size in (-1, mesh.size()):
        return mesh
    return init_device_mesh(
        mesh.device_type, (mesh.size() // fsdp_size, fsdp_size), mesh_dim_names=("replicate", "shard")
    )


def _shard(model: PreTrainedModel, config: ModelConfig, mesh: DeviceMesh, trainable: bool) -> None:
    """Shard ``model`` in place.

    Each decoder layer is a unit of its own, so that beside the embedding and the head only one layer's full parameters
    are in memory at a time.
    """
    model.requires_grad_(trainable)
    if has_adapters(model):
        train_adapters_alone(model)
    if hasattr(model, VALUE_HEAD):
        # Small differences between values matter: the head's products stay in float32.
        fully_shard(model.score, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.float32))
    # Gradients are summed in float32 whatever the precision of the products: a sum over ranks must not lose bits.
    policy = MixedPrecisionPolicy(param_dtype=getattr(torch, config.param_dtype), reduce_dtype=torch.float32)
    for layer in decoder_layers(model):
        if trainable and config.gradient_checkpointing:
            # Not by transformers' own switch, which is off in models in evaluation mode, as ours are. Without dropout
            # there is no random state to bring back either.
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    # A model that learns needs embedding and head again in the backward pass, which starts where the forward ends.
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=not trainable)


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The blocks that ``transformers`` asks to keep in one piece: the layers that make up the model's body."""
    names = set(model._no_split_modules or [])
    return [module for module in model.modules() if type(module).__name__ in names]


def offloaded_parameters(model: nn.Module, enabled: bool) -> Offloaded:
    """Keep a sharded model's parameters in the host's memory but inside ``with result.loaded():``, if ``enabled``."""

    def tensors() -> list[nn.Parameter]:
        reshard(model)
        return list(model.parameters())

    def refuse(*_: object) -> None:
        if any(map(is_away, model.parameters())):
            raise RuntimeError("the model is offloaded to the host's memory; use it inside `with ....loaded():`")

    if enabled:
        model.register_forward_pre_hook(refuse, prepend=True)
    return Offloaded(tensors, enabled, constant=not any(p.requires_grad for p in model.parameters()))


def reshard(model: nn.Module) -> None:
    """Let go of the whole parameters that a forward pass without a backward leaves at the root of a sharded model."""
    if isinstance(model, FSDPModule):
        model.reshard()


def full_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter by name, adapters merged, gathered one at a time; all ranks must walk through it together."""
    reshard(model)
    for name, parameter in model.named_parameters():
        if not is_adapter(name):
            yield name_without_adapters(name), merged(model, name, whole(parameter), whole)


def checkpoint_parameters(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """As :func:`full_parameters`, but all that the model's files have, under their names and in their pieces.

    ``transformers`` renames and joins some weights as it loads them, such as those of a mixture's experts. Some models
    have buffers among their weights, which no step changes, but which an engine that slept has forgotten.
    """
    saved = model.state_dict().keys()
    buffers = ((name, buffer) for name, buffer in model.named_buffers() if name in saved)
    names = [name_without_adapters(name) for name in saved if not is_adapter(name)]
    return as_in_files(model, names, chain(full_parameters(model), buffers))


@contextmanager
def kept_whole(model: PreTrainedModel) -> Iterator[None]:
    """Within the block ``model`` keeps its parameters whole, in ``param_dtype``, once a forward pass has gathered them.

    For a model that learns, without gradients. All ranks must make the block's first forward pass; of further ones,
    which communicate no more, each makes as many as it likes.
    """
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for unit in units:
        unit.set_reshard_after_forward(False, recurse=False)
    try:
        yield
    finally:
        for unit in units:
            # As _shard has it: the root alone stays whole between forward and backward.
            unit.set_reshard_after_forward(unit is not model, recurse=False)
            unit.reshard()


def export_adapters(model: PreTrainedModel, folder: Path) -> None:
    """Write a LoRA model's adapters in peft's format; all ranks must call it, rank 0 writes."""
    reshard(model)
    save_adapters(model, folder, whole)
