"""Facts about a model, read once per process from the files beside its weights, and whether these fit them."""

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
"""The head of a value model."""

GENERATION = "generation_config.json"

ROPE = "rope_parameters"
"""Options of rotary embeddings in ``transformers``."""
OLDER_NAMES = ("rope_scaling", "rope_theta")
"""Their names in most models' ``config.json``."""


class GenerationSettings(GenerationConfig):
    """Settings for generation that are written as they were read.

    ``transformers`` refuses to write what it only warns of when it reads it, such as a temperature without
    ``do_sample``, which many models have. A run must not end at its first checkpoint for that.
    """

    def validate(self, strict: bool = False, **options: Any) -> None:  # type: ignore[override]  # options vary by version
        """Warn, and raise ``ValueError`` only for what could not have been read either."""
        super().validate(**options)


@dataclass(frozen=True)
class ModelInfo:
    """Facts about a model from ``config.json`` and ``generation_config.json``.

    All callers share it: copy ``config`` before changing it.
    """

    path: str
    trust_remote_code: bool
    config: PreTrainedConfig

    @classmethod
    @cache
    def read(cls, path: str, trust_remote_code: bool, override_config: str = "{}") -> "ModelInfo":
        """Read at the first call for each model; raises ``ConfigError`` if there is none.

        ``override_config``: values put over those of ``config.json``, as JSON.
        """
        try:
            config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        except Exception as error:  # a model's own file, which may hold anything, and of a hub model its own code
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
        """As :meth:`read`, for the model that the options name."""
        return cls.read(model.path, model.trust_remote_code, json.dumps(model.override_config, sort_keys=True))

    @property
    def text_config(self) -> Any:
        """The config of the language model, which for a model that sees images is a part of ``config``."""
        return self.config.get_text_config()

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return int(self.text_config.num_hidden_layers)

    @property
    def max_length(self) -> int | None:
        """Longest sequence that the model was made for; None where its config does not say."""
        return getattr(self.text_config, "max_position_embeddings", None)

    @cached_property
    def generation_config(self) -> GenerationConfig | None:
        """``generation_config.json``; None where there is no such file."""
        file = Path(self.path, GENERATION)
        if Path(self.path).is_dir() and not file.exists():
            return None
        try:
            return GenerationSettings.from_pretrained(self.path)
        except Exception as error:  # it may hold anything
            if isinstance(error, OSError) and not file.exists():
                return None
            reason = f"cannot read its {GENERATION}: {in_one_line(error)}"
            raise ConfigError(f"model.path={self.path!r}: {reason}; restore it, or remove it") from error

    def end_tokens(self, tokenizer: PreTrainedTokenizerBase, further: Iterable[int] = ()) -> list[int]:
        """Tokens that end a response, in ascending order.

        The tokenizer's end-of-sequence token, those of ``generation_config.json`` (in a folder without that file, of
        ``config.json``), and ``further`` ones.
        """
        settings = self.generation_config
        named = (GenerationConfig.from_model_config(self.config) if settings is None else settings).eos_token_id
        named = named if isinstance(named, list) else [named]
        rows = self.text_config.vocab_size
        of_file = GENERATION if settings is not None else "config.json"
        for ids, field in ((further, "rollout.stop_token_ids"), (named, f"model.path={self.path!r}: {of_file}: eos")):
            for token in ids:
                if token is not None and (type(token) is not int or not 0 <= token < rows):
                    fix = f"the model has tokens 0 to {rows - 1}; name one of them"
                    raise ConfigError(f"{field}={token!r:.40}: {fix}")
        return sorted({token for token in (tokenizer.eos_token_id, *further, *named) if token is not None})

    def meta_model(self, auto_class: Any, num_labels: int | None = None) -> PreTrainedModel:
        """Make a new model on the meta device in float32, by an auto class of ``transformers``.

        ``num_labels``: outputs of a classifier; None: as ``config`` has it. Raises ``ConfigError`` for a model of
        another kind.
        """
        config = deepcopy(self.config)
        if num_labels is not None:
            config.num_labels = num_labels
        options = {"dtype": torch.float32, "trust_remote_code": self.trust_remote_code}
        try:
            with torch.device("meta"):
                model: PreTrainedModel = auto_class.from_config(config, **options)
        except Exception as error:  # options that contradict each other, or a model's own code
            reason = f"its config.json describes no model: {in_one_line(error)}"
            raise ConfigError(f"model.path={self.path!r}: {reason}") from error
        return model

    @cached_property
    def causal_model(self) -> PreTrainedModel:
        """The language model on the meta device; shared, so do not change it."""
        return self.meta_model(AutoModelForCausalLM)

    @cached_property
    def has_value_form(self) -> bool:
        """Whether ``transformers`` has a token classification form of it, with a head named score."""
        known = type(self.config) in MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING
        return known and hasattr(self.meta_model(AutoModelForTokenClassification), VALUE_HEAD)


def _overridden(config: PreTrainedConfig, path: str, overrides: dict[str, Any]) -> PreTrainedConfig:
    """``config`` of the model at ``path`` with other values."""
    values = config.to_dict()
    # What a class reads from its file without being asked to, such as older names, counts as known.
    known = sorted({*values, *PreTrainedConfig().to_dict(), *config.attribute_map, *OLDER_NAMES})
    without_effect = _without_effect(config, overrides)
    for name, value in overrides.items():
        if name == "model_type" or (name not in known and not hasattr(config, name) and name not in without_effect):
            near = get_close_matches(name, known, n=1)
            fix = f"did you mean {near[0]}?" if near and near[0] != name else "a model keeps its architecture's options"
            raise ConfigError(
                f"model.override_config.{name}={value!r}: {config.model_type} at {path!r} has no such option; {fix}"
            )
    given = overrides
    overrides = {name: value for name, value in overrides.items() if name not in without_effect}
    rope = values.get(ROPE)
    if isinstance(rope, dict) and not any(isinstance(value, dict) for value in rope.values()):
        # The newer name holds the base of the embedding too, which the older ones leave as it is.
        scaling = overrides.pop("rope_scaling", None) or overrides.pop(ROPE, None) or rope
        base = {name: overrides.pop(name) for name in ("rope_theta",) if name in overrides}
        overrides[ROPE] = {"rope_theta": rope.get("rope_theta")} | scaling | base
    try:
        return type(config).from_dict(values | overrides)
    except (TypeError, ValueError, StrictDataclassError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"model.override_config={given!r}: {config.model_type} refuses it: {reason}") from error


def _without_effect(config: PreTrainedConfig, overrides: Mapping[str, Any]) -> list[str]:
    """Names of rates of dropout that the architecture does not have and that are 0, as it has them.

    veRL's commands set those of several architectures at once. A misspelt name of a rate that the model does have, and
    that is not 0, is not among them.
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
    """Return a line about values of ``model.override_config`` that change nothing, if any."""
    info = ModelInfo.read(model.path, model.trust_remote_code)
    names = _without_effect(info.config, model.override_config)
    kind = info.config.model_type
    return [f"model.override_config: no effect of {', '.join(names)}=0: {kind} has no such dropout"] if names else []


def override_engine_config(model: ModelConfig, config: PreTrainedConfig) -> PreTrainedConfig:
    """Put ``model.override_config`` over the config that vLLM has read; what its ``hf_overrides`` calls."""
    wanted = ModelInfo.of(model).config
    for name in model.override_config:
        if not hasattr(wanted, name) and name not in OLDER_NAMES:
            continue  # without effect
        name = ROPE if name in OLDER_NAMES and hasattr(wanted, ROPE) else name
        setattr(config, name, deepcopy(getattr(wanted, name)))
    return config


def resolve_layers(layers: Sequence[int], depth: int) -> list[int]:
    """``layers`` of a model that has ``depth``, counted from the first.

    Raises:
        ConfigError: the model has no such layer, or one is named twice.
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
    """Raise ``ConfigError`` if files of the weights are missing, cut short, or of other shapes than the config's.

    Of weights in an older form than safetensors nothing but their presence is checked.

    Args:
        where: the option that names the model, with its value.
    """
    folder = Path(local_folder(info.path))
    if not is_complete(folder):
        raise ConfigError(f"{where}: files of its weights are missing; name a folder saved by save_pretrained")
    shapes: dict[str, list[int]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        shapes |= tensor_shapes(file, where)
    for name, shape in _expected(info).items():
        if name in shapes and shapes[name] != shape:
            raise ConfigError(
                f"{where}: {name} has shape {shapes[name]} in its files, and {shape} by its config.json "
                "(vocab_size, hidden_size, ...); restore that file, or name a complete model"
            )


def tensor_shapes(file: Path, where: str) -> dict[str, list[int]]:
    """Return the shape of each tensor in a file of weights, from its header, whose length the file states first.

    Raises ``ConfigError``, which begins with ``where``, if the file is missing or broken.
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
    names = ("_attn_implementation", "_experts_implementation")
    found = (str(getattr(part, name, None)) for part in parts for name in names)
    return sorted({name for name in found if "/" in name})


def _expected(info: ModelInfo) -> dict[str, list[int]]:
    """Name -> shape of the parameters of the language model, as far as its files keep their names."""
    if type(info.config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return {}
    # transformers joins the weights of experts, and may turn them.
    parameters = info.causal_model.named_parameters()
    return {name: list(parameter.shape) for name, parameter in parameters if ".experts." not in name}
