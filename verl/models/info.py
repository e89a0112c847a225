"""Reads a model's metadata from its config files, once per process, and checks its weight files."""

import json
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from verl.config.common import ModelConfig
from verl.config.errors import ConfigError, in_one_line
from verl.models.hub import is_complete, local_folder

VALUE_HEAD = "score"
"""Name of the value head's submodule in a model."""

GENERATION = "generation_config.json"

ROPE = "rope_parameters"
"""Name of the rotary embedding options in ``transformers``."""
OLDER_NAMES = ("rope_scaling", "rope_theta")
"""Names of the rotary embedding options in most ``config.json`` files."""


class GenerationSettings(GenerationConfig):
    """A generation config that can always be saved.

    ``transformers`` only warns when it loads an inconsistent config, such as one with a temperature but no
    ``do_sample``. Saving an inconsistent config raises an error, which would end a run at its first checkpoint.
    """

    def validate(self, strict: bool = False, **options: Any) -> None:  # type: ignore[override]  # options vary by version
        """Ignore ``strict`` and validate as leniently as ``transformers`` does when it loads a config."""
        super().validate(**options)


@dataclass(frozen=True)
class ModelInfo:
    """Metadata of a model from ``config.json`` and ``generation_config.json``.

    Instances are shared between callers, so copy ``config`` before changing it.
    """

    path: str
    trust_remote_code: bool
    config: PreTrainedConfig

    @classmethod
    @cache
    def read(cls, path: str, trust_remote_code: bool, override_config: str = "{}") -> "ModelInfo":
        """Read a model's metadata and cache it. Raises ``ConfigError`` if the config cannot be read.

        ``override_config`` is a JSON object whose values replace values in ``config.json``.
        """
        try:
            config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        except Exception as error:  # The file may contain anything, and a hub model may run its own code.
            raise ConfigError(f"model.path={path!r}: cannot read its config.json: {in_one_line(error)}") from error
        if not trust_remote_code and (kernels := _hub_kernels(config)):
            raise ConfigError(
                f"model.path={path!r}: its config.json names code of the hub, {', '.join(kernels)} "
                "(attn_implementation, experts_implementation); remove that, or set trust_remote_code if you trust it"
            )
        overrides = json.loads(override_config)
        return cls(path, trust_remote_code, _overridden(config, path, overrides) if overrides else config)

    @classmethod
    def of(cls, model: ModelConfig) -> "ModelInfo":
        """Call :meth:`read` with the options in ``model``."""
        return cls.read(model.path, model.trust_remote_code, json.dumps(model.override_config, sort_keys=True))

    @property
    def text_config(self) -> Any:
        """Config of the language model, which is a part of ``config`` in a vision-language model."""
        return self.config.get_text_config()

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return int(self.text_config.num_hidden_layers)

    @property
    def max_length(self) -> int | None:
        """Maximum sequence length in tokens, or None if the config does not specify it."""
        return getattr(self.text_config, "max_position_embeddings", None)

    @cached_property
    def generation_config(self) -> GenerationConfig | None:
        """Generation config from ``generation_config.json``, or None if there is no such file."""
        file = Path(self.path, GENERATION)
        if Path(self.path).is_dir() and not file.exists():
            return None
        try:
            return GenerationSettings.from_pretrained(self.path)
        except Exception as error:  # The file may contain anything.
            if isinstance(error, OSError) and not file.exists():
                return None
            reason = f"cannot read its {GENERATION}: {in_one_line(error)}"
            raise ConfigError(f"model.path={self.path!r}: {reason}; restore it, or remove it") from error

    def end_tokens(self, tokenizer: PreTrainedTokenizerBase, further: Iterable[int] = ()) -> list[int]:
        """Return the tokens that end a response, in ascending order.

        End tokens are the tokenizer's end-of-sequence token, the tokens in ``further``, and the end tokens in
        ``generation_config.json``, or in ``config.json`` if that file is missing.
        """
        settings = self.generation_config
        eos = (GenerationConfig.from_model_config(self.config) if settings is None else settings).eos_token_id
        eos = eos if isinstance(eos, list) else [eos]
        vocabulary = self.text_config.vocab_size
        file = GENERATION if settings is not None else "config.json"
        for ids, field in ((further, "rollout.stop_token_ids"), (eos, f"model.path={self.path!r}: {file}: eos")):
            for token in ids:
                if token is not None and (type(token) is not int or not 0 <= token < vocabulary):
                    fix = f"the model has tokens 0 to {vocabulary - 1}; name one of them"
                    raise ConfigError(f"{field}={token!r:.40}: {fix}")
        return sorted({token for token in (tokenizer.eos_token_id, *further, *eos) if token is not None})

    def meta_model(self, auto_class: Any, num_labels: int | None = None) -> PreTrainedModel:
        """Create a float32 model on the meta device with an auto class of ``transformers``.

        ``num_labels`` is the number of outputs of a classifier, or None to use the value in ``config``. Raises
        ``ConfigError`` if the auto class does not support the model.
        """
        config = deepcopy(self.config)
        if num_labels is not None:
            config.num_labels = num_labels
        options = {"dtype": torch.float32, "trust_remote_code": self.trust_remote_code}
        try:
            with torch.device("meta"):
                model: PreTrainedModel = auto_class.from_config(config, **options)
        except Exception as error:  # Options may conflict, and a hub model may run its own code.
            reason = f"its config.json describes no model: {in_one_line(error)}"
            raise ConfigError(f"model.path={self.path!r}: {reason}") from error
        return model

    @cached_property
    def causal_model(self) -> PreTrainedModel:
        """Language model on the meta device. The model is shared between callers, so do not change it."""
        return self.meta_model(AutoModelForCausalLM)

    @cached_property
    def has_value_form(self) -> bool:
        """Whether ``transformers`` has a token classification model of this type with a head named ``score``."""
        known = type(self.config) in MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING
        return known and hasattr(self.meta_model(AutoModelForTokenClassification), VALUE_HEAD)


def _overridden(config: PreTrainedConfig, path: str, overrides: dict[str, Any]) -> PreTrainedConfig:
    """Return the ``config`` of the model at ``path`` with ``overrides`` applied."""
    values = config.to_dict()
    known = sorted({*values, *PreTrainedConfig().to_dict(), *config.attribute_map, *OLDER_NAMES})
    without_effect = _without_effect(config, overrides)
    for name, value in overrides.items():
        if name == "model_type" or (name not in known and not hasattr(config, name) and name not in without_effect):
            near = get_close_matches(name, known, n=1)
            fix = f"did you mean {near[0]}?" if near and near[0] != name else "a model keeps its architecture's options"
            raise ConfigError(
                f"model.override_config.{name}={value!r}: {config.model_type} at {path!r} has no such option; {fix}"
            )
    changed = {name: value for name, value in overrides.items() if name not in without_effect}
    rope = values.get(ROPE)
    if isinstance(rope, dict) and not any(isinstance(value, dict) for value in rope.values()):
        # The newer option includes rope_theta, which rope_scaling leaves unchanged.
        scaling = changed.pop("rope_scaling", None) or changed.pop(ROPE, None) or rope
        base = {name: changed.pop(name) for name in ("rope_theta",) if name in changed}
        changed[ROPE] = {"rope_theta": rope.get("rope_theta")} | scaling | base
    try:
        return type(config).from_dict(values | changed)
    except (TypeError, ValueError, StrictDataclassError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"model.override_config={overrides!r}: {config.model_type} refuses it: {reason}") from error


def _without_effect(config: PreTrainedConfig, overrides: Mapping[str, Any]) -> list[str]:
    """Return the names of zero dropout rates in ``overrides`` that the architecture does not have.

    veRL's commands set rates for several architectures at once. Names that resemble one of the model's nonzero rates
    are excluded, because they are probably misspelt.
    """
    values = config.to_dict()

    def rate(name: str) -> Any:
        near = get_close_matches(name, values, n=1)
        return values[near[0]] if near else 0

    return [
        name
        for name, value in overrides.items()
        if "drop" in name and value == 0 and not hasattr(config, name) and rate(name) in (0, None)
    ]


def override_notes(model: ModelConfig) -> list[str]:
    """Return a list of at most one warning about values in ``model.override_config`` that have no effect."""
    info = ModelInfo.read(model.path, model.trust_remote_code)
    names = _without_effect(info.config, model.override_config)
    kind = info.config.model_type
    return [f"model.override_config: no effect of {', '.join(names)}=0: {kind} has no such dropout"] if names else []


def override_engine_config(model: ModelConfig, config: PreTrainedConfig) -> PreTrainedConfig:
    """Apply ``model.override_config`` to vLLM's config. vLLM calls this function as ``hf_overrides``."""
    source = ModelInfo.of(model).config
    for name in model.override_config:
        if not hasattr(source, name) and name not in OLDER_NAMES:
            continue  # It has no effect.
        name = ROPE if name in OLDER_NAMES and hasattr(source, ROPE) else name
        setattr(config, name, deepcopy(getattr(source, name)))
    return config


def resolve_layers(layers: Sequence[int], depth: int) -> list[int]:
    """Convert layer indices, which may be negative, to nonnegative indices for a model with ``depth`` layers.

    Raises ``ConfigError`` if an index is out of range or a layer is repeated.
    """
    for layer in layers:
        if not -depth <= layer < depth:
            raise ConfigError(
                f"calculator.layers={list(layers)!r}: the model has {depth} layers, from {-depth} to {depth - 1}"
            )
    resolved = [layer % depth for layer in layers]
    if len(set(resolved)) < len(resolved):
        raise ConfigError(f"calculator.layers={list(layers)!r}: names a layer of the model's {depth} twice")
    return resolved


def check_weights(info: ModelInfo, where: str) -> None:
    """Raise ``ConfigError`` if weight files are missing, are truncated, or contradict the shapes in the config.

    Shapes are checked only in safetensors files. ``where`` is the option that names the model, with its value.
    """
    folder = Path(local_folder(info.path))
    if not is_complete(folder):
        raise ConfigError(f"{where}: files of its weights are missing; name a folder saved by save_pretrained")
    shapes: dict[str, list[int]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        shapes |= tensor_shapes(file, where)
    for name, shape in _expected_shapes(info).items():
        if name in shapes and shapes[name] != shape:
            raise ConfigError(
                f"{where}: {name} has shape {shapes[name]} in its files, and {shape} by its config.json "
                "(vocab_size, hidden_size, ...); restore that file, or name a complete model"
            )


def tensor_shapes(file: Path, where: str) -> dict[str, list[int]]:
    """Return the shape of each tensor in a safetensors file.

    Raises ``ConfigError`` with a message that begins with ``where`` if the file is missing or broken.
    """
    try:
        with safe_open(file, framework="pt") as tensors:
            return {name: list(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, MemoryError) as error:
        reason = "is missing" if not file.exists() else f"is broken or cut short ({in_one_line(error)})"
        raise ConfigError(f"{where}: {file.name} {reason}; fetch or copy it again") from error


def _hub_kernels(config: PreTrainedConfig) -> list[str]:
    """Return the hub repositories whose code transformers would run for the model's attention or experts."""
    parts = [config, *(getattr(config, name, None) for name in config.sub_configs)]
    attributes = ("_attn_implementation", "_experts_implementation")
    kernels = (str(getattr(part, attribute, None)) for part in parts for attribute in attributes)
    return sorted({name for name in kernels if "/" in name})


def _expected_shapes(info: ModelInfo) -> dict[str, list[int]]:
    """Return the shapes of all language model parameters except experts, which have other names in the files."""
    if type(info.config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return {}
    # transformers stacks expert weights and may transpose them.
    parameters = info.causal_model.named_parameters()
    return {name: list(parameter.shape) for name, parameter in parameters if ".experts." not in name}
