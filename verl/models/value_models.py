"""Value models: transformers with a head that gives one number per token, for the critic and the reward model."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
import transformers
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoModelForTokenClassification, PreTrainedModel

from verl.config.common import ModelConfig
from verl.config.errors import ConfigError
from verl.models.info import VALUE_HEAD, ModelInfo
from verl.models.loading import load_and_shard, pretrained_options


def load_sharded_value_model(config: ModelConfig, mesh: DeviceMesh, trainable: bool, new_head: bool) -> PreTrainedModel:
    """Load a transformer with a head ``score`` and shard it as :func:`verl.models.loading.load_sharded_model` does.

    Args:
        new_head: whether a checkpoint without a head will do, such as a language model; the head then starts at 0.

    Raises:
        ConfigError: weights of the body are missing; or ``new_head`` is false and there is no head, one of another
            size, or more than a head.
    """
    return load_and_shard(partial(_read_value_model, config, new_head), config, mesh, trainable)


def _read_value_model(config: ModelConfig, new_head: bool, device: str) -> PreTrainedModel:
    model: PreTrainedModel
    options = pretrained_options(config, device)
    options["config"].num_labels = 1
    with _without_loading_report():
        model, loading = AutoModelForTokenClassification.from_pretrained(
            config.path, output_loading_info=True, ignore_mismatched_sizes=True, **options
        )
    missing = sorted({*loading["missing_keys"], *(entry[0] for entry in loading["mismatched_keys"])})
    if body := [name for name in missing if not name.startswith(f"{VALUE_HEAD}.")]:
        field = "critic.model.path" if new_head else "reward_model.model.path"
        raise ConfigError(
            f"{field}={config.path!r}: its files lack weights of {type(model).__name__}: {', '.join(body)}; name a "
            "complete model"
        )
    if not new_head:
        unknown = sorted(name for name in loading["unexpected_keys"] if not name.startswith("lm_head."))
        if f"{VALUE_HEAD}.weight" in missing or unknown:
            found = f"has further weights {unknown}" if unknown else "has no head with one output"
            raise ConfigError(
                f"reward_model.model.path={config.path!r}: {found}; name a model that was saved by "
                "AutoModelForSequenceClassification with num_labels=1"
            )
    with torch.no_grad():
        # Zeros rather than transformers' random numbers: every value is 0 before learning.
        for name in missing:
            model.get_parameter(name).zero_()
    return model


@contextmanager
def _without_loading_report() -> Iterator[None]:
    """Keep ``transformers`` from warning about missing weights, which the caller checks itself."""
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(verbosity)


def check_value_architecture(config: ModelConfig, field: str) -> None:
    """Raise ``ConfigError`` naming ``field`` unless :func:`load_sharded_value_model` can load this architecture."""
    info = ModelInfo.of(config)
    if not info.has_value_form:
        raise ConfigError(
            f"{field}={config.path!r}: transformers has no token classification form with a head named score for "
            f"{info.config.model_type}; it has one for Llama, Mistral, Qwen2, Qwen3 and Gemma2, among others"
        )
