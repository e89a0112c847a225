"""Checks of a model's files and options at startup."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from verl.config.common import ModelConfig
from verl.config.errors import ConfigError
from verl.config.teacher import options_of, path_option
from verl.models.fsdp import decoder_layers
from verl.models.info import ModelInfo, check_weights
from verl.models.lora import adapter_options

MODALITIES = ("vision_config", "audio_config", "video_config")
"""Names of sub-configs that indicate a multimodal model."""

GPU_PACKAGES = {
    "flash_attention_2": (
        *("flash_attn", "flash_attn_varlen_func", "flash-attn"),
        "compile it (minutes to hours) with `pip install --no-build-isolation flash-attn`",
    ),
    "flash_attention_3": (
        *("flash_attn_interface", "flash_attn_varlen_func", "flash-attn-3"),
        "build it from https://github.com/Dao-AILab/flash-attention, folder hopper",
    ),
    "liger": ("liger_kernel", "", "liger-kernel", "`pip install liger-kernel`"),
}
"""Maps GPU-only kernels to their module, a symbol in its source, package, and installation instructions. The symbol
identifies the real module, as package indexes contain empty packages of the same name."""

PACKABLE_LAYERS = {"full_attention", "sliding_attention"}
"""Layer types that support packed sequences."""


def check_model(config: ModelConfig, prefix: str, device_type: str) -> None:
    """Raise ``ConfigError`` if a required package is missing, or if the model is incompatible with one of its options.

    Args:
        prefix: key of ``PPOConfig.models``, such as ``critic.model``.
        device_type: ``cpu`` or ``cuda``.
    """
    info, options = ModelInfo.of(config), options_of(prefix)
    _check_text_model(config, info, prefix)
    check_weights(info, f"{path_option(prefix)}={config.path!r}")
    try:
        _check_options(config, info, options, device_type)
    except ConfigError as error:
        if options == prefix:
            raise
        raise ConfigError(f"{prefix}: {error}") from error


def _check_options(config: ModelConfig, info: ModelInfo, prefix: str, device_type: str) -> None:
    _check_attention(config, info, prefix, device_type)
    if config.use_liger:
        field, kind = f"{prefix}.use_liger=True", info.config.model_type
        _require_gpu_package(field, "liger", device_type, "false")
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

        if kind not in MODEL_TYPE_TO_APPLY_LIGER_FN:
            raise ConfigError(f"{field}: liger-kernel has no kernels for {kind}; set it to false")
    _check_packing(config, info, prefix)
    if config.gradient_checkpointing and not decoder_layers(info.causal_model):
        raise ConfigError(
            f"{prefix}.gradient_checkpointing=True: {type(info.causal_model).__name__} does not name its layers "
            "(_no_split_modules); set it to false"
        )
    if config.trains_adapters:
        adapter_options(info.causal_model, config, prefix)


def _check_text_model(config: ModelConfig, info: ModelInfo, prefix: str) -> None:
    field, kind = f"{path_option(prefix)}={config.path!r}", info.config.model_type
    further = [name.removesuffix("_config") for name in MODALITIES if getattr(info.config, name, None) is not None]
    if further:
        raise ConfigError(
            f"{field}: {kind} is a multimodal checkpoint (text and {', '.join(further)}), and only text models are "
            "trained, sampled and measured; name a text model, or save the language model inside it by itself"
        )
    # Critics and reward models are checked by check_value_architecture.
    remote_code = "AutoModelForCausalLM" in (getattr(info.config, "auto_map", None) or {})
    valued = prefix in ("critic.model", "reward_model.model")
    if not valued and type(info.config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not remote_code:
        raise ConfigError(f"{field}: {kind} is not a causal language model in transformers; name one")


def _check_attention(config: ModelConfig, info: ModelInfo, prefix: str, device_type: str) -> None:
    field = f"{prefix}.attn_implementation={config.attn_implementation!r}"
    _check_attention_name(config.attn_implementation, info, field, device_type)
    if config.attn_implementation in GPU_PACKAGES:
        _require_gpu_package(field, config.attn_implementation, device_type, "sdpa")
        if config.param_dtype == "float32":
            raise ConfigError(f"{field}: does not support float32; set {prefix}.param_dtype=bfloat16")
    cap = getattr(info.text_config, "attn_logit_softcapping", None)
    # The sdpa implementation silently ignores a soft cap.
    if cap is not None and config.attn_implementation == "sdpa":
        raise ConfigError(
            f"{field}: does not support the soft cap on attention scores of {info.text_config.model_type} "
            f"(attn_logit_softcapping={cap:g}); set it to eager or flash_attention_2"
        )


def _check_attention_name(name: str, info: ModelInfo, field: str, device_type: str) -> None:
    """Raise ``ConfigError`` if ``transformers`` lacks the attention implementation for the model or device."""
    known = [key for key in ALL_ATTENTION_FUNCTIONS.valid_keys() if "|" not in key and not key.startswith("packed_")]
    # Names of the form owner/name refer to kernels on the hub.
    if not ("/" in name and find_spec("kernels") is not None) and name not in [*known, "eager"]:
        raise ConfigError(f"{field}: transformers has no such attention; set it to one of eager, {', '.join(known)}")
    if device_type != "cuda" and (name.startswith("flash") or "/" in name):
        raise ConfigError(f"{field}: runs on GPUs only; set it to sdpa")
    attribute = {"sdpa": "_supports_sdpa", "flex_attention": "_supports_flex_attn"}.get(name)
    if attribute and type(info.config) in MODEL_FOR_CAUSAL_LM_MAPPING and not getattr(info.causal_model, attribute):
        raise ConfigError(f"{field}: {info.config.model_type} does not support it; set it to eager")


def _require_gpu_package(field: str, name: str, device_type: str, fallback: str) -> None:
    """Raise a ``ConfigError`` that suggests the value ``fallback`` if the package for ``name`` cannot be used."""
    module, symbol, package, how = GPU_PACKAGES[name]
    if device_type != "cuda":
        raise ConfigError(f"{field}: runs on GPUs only; set it to {fallback}")
    if not _has_symbol(module, symbol):
        more = ", which needs no package" if fallback == "sdpa" else ""
        raise ConfigError(f"{field}: {package} is not installed; {how}, or set it to {fallback}{more}")


def _has_symbol(module: str, symbol: str) -> bool:
    """Return whether an installed module's source contains ``symbol``. Importing the module might require a GPU."""
    spec = find_spec(module)
    if spec is None:
        return False
    return not symbol or (spec.origin is not None and symbol in Path(spec.origin).read_text(errors="replace"))


def _check_packing(config: ModelConfig, info: ModelInfo, prefix: str) -> None:
    if not config.use_remove_padding:
        return
    model = f"{info.text_config.model_type} at {config.path!r}"
    kinds = set(getattr(info.text_config, "layer_types", None) or PACKABLE_LAYERS)
    if not kinds <= PACKABLE_LAYERS:
        raise ConfigError(
            f"{prefix}.use_remove_padding=true: {model} has layers of kind {sorted(kinds - PACKABLE_LAYERS)}, which "
            "would mix packed rows; set it to false"
        )
    auto_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(info.text_config), None)
    if auto_class is not None and not auto_class._can_set_attn_implementation():
        raise ConfigError(
            f"{prefix}.use_remove_padding=true: {model} has its own attention function, which would mix packed rows; "
            "set it to false"
        )
    size, heads = config.ulysses_sequence_parallel_size, info.text_config.num_attention_heads
    if heads % size:
        raise ConfigError(
            f"{prefix}.ulysses_sequence_parallel_size={size}: must divide the {heads} attention heads of "
            f"{config.path!r}"
        )


def check_value_architecture(config: ModelConfig, field: str) -> None:
    """Raise a ``ConfigError`` that names ``field`` if ``transformers`` has no value model for this architecture."""
    info = ModelInfo.of(config)
    if not info.has_value_form:
        raise ConfigError(
            f"{field}={config.path!r}: transformers has no token classification form with a head named score for "
            f"{info.config.model_type}; it has one for Llama, Mistral, Qwen2, Qwen3 and Gemma2, among others"
        )


def check_sequence_fits(field: str, length: int, model_field: str, model: ModelConfig) -> None:
    """Raise ``ConfigError`` if ``model`` does not support sequences of ``length`` tokens.

    ``field`` and ``model_field`` name the options that set the length and the model.
    """
    limit = ModelInfo.of(model).max_length
    if limit is not None and length > limit:
        raise ConfigError(
            f"{field}={length}: {model_field}={model.path!r} takes sequences of {limit} tokens "
            f"(max_position_embeddings in its config.json); lower {field}, name another model, or if this one supports "
            "it set override_config.max_position_embeddings and rope_scaling beside its path"
        )


def check_length(config: ModelConfig, prefix: str, longest: int) -> None:
    """Raise ``ConfigError`` if the results for a sequence could depend on other sequences in its micro-batch.

    Some rotary embeddings ("dynamic", "longrope") change the frequencies for the whole batch if any sequence exceeds
    the original context length. ``longest`` is the maximum sequence length in tokens.
    """
    model = ModelInfo.of(config).text_config
    parameters = getattr(model, "rope_parameters", None) or {}
    # The parameters are either shared by all layers or nested by layer type.
    for rope in (parameters, *parameters.values()):
        kind = rope.get("rope_type") if isinstance(rope, dict) else None
        if kind not in ("dynamic", "longrope"):
            continue
        limit = rope["original_max_position_embeddings"] if kind == "longrope" else model.max_position_embeddings
        if longest > limit:
            raise ConfigError(
                f"{path_option(prefix)}={config.path!r}: sequences may have {longest} tokens, and beyond {limit} the "
                f"rotary embedding of {model.model_type} ({kind}) makes results depend on the other sequences of a "
                "micro-batch; allow shorter prompts and responses"
            )
