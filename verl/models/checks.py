"""What can be known of a model's options before workers start: from its config file, without its weights."""

from importlib.util import find_spec

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from verl.config.common import ModelConfig
from verl.models.forward import check_layout
from verl.models.fsdp import decoder_layers
from verl.models.lora import target_names

FLASH_PACKAGES = {
    "flash_attention_2": ("flash_attn", "flash-attn", "`pip install flash-attn`"),
    "flash_attention_3": (
        "flash_attn_interface",
        "flash-attn-3",
        "build it from https://github.com/Dao-AILab/flash-attention, folder hopper",
    ),
}
"""Attention implementation -> the module that it needs, the package that has it, and how that is installed."""


def check_model(config: ModelConfig, prefix: str, device_type: str) -> None:
    """Check what a model's options ask of the machine and of its architecture.

    Args:
        config: options of a model that learns, or of a reward model.
        prefix: where they stand in the whole config, such as ``critic.model``.
        device_type: ``cpu`` or ``cuda``.

    Raises:
        ValueError: a package is missing, or the model has not what an option needs; the message names the option.
    """
    if config.attn_implementation in FLASH_PACKAGES:
        field = f"{prefix}.attn_implementation={config.attn_implementation!r}"
        _require_gpu_package(field, *FLASH_PACKAGES[config.attn_implementation], device_type, "set it to sdpa")
        if config.param_dtype == "float32":
            raise ValueError(f"{field}: has no float32; set {prefix}.param_dtype=bfloat16, or it to sdpa")
    _check_softcap(config, prefix)
    if config.use_liger:
        field = f"{prefix}.use_liger=True"
        how = "`pip install liger-kernel`"
        _require_gpu_package(field, "liger_kernel", "liger-kernel", how, device_type, "set it to false")
        _check_liger_knows(config, prefix)
    check_layout(config, prefix)
    if config.gradient_checkpointing or config.lora.rank:
        _check_layers(config, prefix)


def check_length(config: ModelConfig, prefix: str, longest: int) -> None:
    """Check that what a model computes for a sequence cannot depend on the sequences that it reads together with it.

    Some rotary embeddings ("dynamic", "longrope") change their frequencies for all that is read at once as soon as one
    sequence is longer than those the model was first trained on.

    Args:
        prefix: where the model's options stand in the whole config.
        longest: tokens of the longest sequence that it may read.

    Raises:
        ValueError: a sequence may be that long.
    """
    model = AutoConfig.from_pretrained(config.path, trust_remote_code=config.trust_remote_code).get_text_config()
    parameters = getattr(model, "rope_parameters", None) or {}
    # One for all layers, or one for each kind of layer.
    for rope in (parameters, *parameters.values()):
        kind = rope.get("rope_type") if isinstance(rope, dict) else None
        if kind not in ("dynamic", "longrope"):
            continue
        limit = rope["original_max_position_embeddings"] if kind == "longrope" else model.max_position_embeddings
        if longest > limit:
            raise ValueError(
                f"{prefix}.path={config.path!r}: beyond {limit} tokens the rotary embedding of {model.model_type} "
                f"({kind}) makes results depend on the other sequences of a micro-batch, and sequences may have "
                f"{longest} here; shorten what is allowed of prompts and responses"
            )


def num_layers(config: ModelConfig) -> int:
    """Decoder layers of the model, from its config file."""
    architecture = AutoConfig.from_pretrained(config.path, trust_remote_code=config.trust_remote_code)
    depth: int = architecture.get_text_config().num_hidden_layers
    return depth


def _check_softcap(config: ModelConfig, prefix: str) -> None:
    """``sdpa`` leaves a bound on attention scores out without a word: it would compute another model."""
    architecture = AutoConfig.from_pretrained(config.path, trust_remote_code=config.trust_remote_code)
    text = architecture.get_text_config()
    cap = getattr(text, "attn_logit_softcapping", None)
    if cap is not None and config.attn_implementation == "sdpa":
        raise ValueError(
            f"{prefix}.attn_implementation='sdpa': knows no bound on attention scores, as {text.model_type} has it "
            f"(attn_logit_softcapping={cap:g}); set it to eager or flash_attention_2"
        )


def _require_gpu_package(field: str, module: str, package: str, how: str, device_type: str, otherwise: str) -> None:
    if device_type != "cuda":
        raise ValueError(f"{field}: runs on GPUs alone; {otherwise}")
    if find_spec(module) is None:
        raise ValueError(f"{field}: {package} is not installed; {how}, or {otherwise}")


def _check_liger_knows(config: ModelConfig, prefix: str) -> None:
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    kind = AutoConfig.from_pretrained(config.path, trust_remote_code=config.trust_remote_code).model_type
    if kind not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise ValueError(f"{prefix}.use_liger=True: liger-kernel has no kernels for {kind}; set it to false")


def _check_layers(config: ModelConfig, prefix: str) -> None:
    architecture = AutoConfig.from_pretrained(config.path, trust_remote_code=config.trust_remote_code)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(architecture, trust_remote_code=config.trust_remote_code)
    if config.gradient_checkpointing and not decoder_layers(model):
        raise ValueError(
            f"{prefix}.gradient_checkpointing=True: {type(model).__name__} does not name its layers "
            "(_no_split_modules); set it to false"
        )
    if config.lora.rank:
        try:
            target_names(model, config.lora)
        except ValueError as error:
            raise ValueError(f"{prefix}.{error}") from error
