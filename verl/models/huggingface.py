"""Models as ``transformers`` and vLLM load them: folders in Hugging Face's layout, and models without weights."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.dynamic_module_utils import custom_object_save

CLASSES = {"actor": AutoModelForCausalLM, "critic": AutoModelForTokenClassification}
"""Part of a checkpoint -> the class that its model is loaded with."""

BUFFERS = "buffers.safetensors"
"""What holds a model's persistent buffers in a folder of its architecture; models without any have no such file."""


class GenerationSettings(GenerationConfig):
    """Settings for generation that are written as they were read.

    ``transformers`` refuses to write what it only warns of when it reads it, such as a temperature without
    ``do_sample``, which many models have. A run must not end at its first checkpoint for that.
    """

    def validate(self, strict: bool = False, **options: Any) -> None:
        """Warn, and raise ``ValueError`` only for what could not have been read either."""
        super().validate(**options)


def empty_model(part: str, path: str | Path, trust_remote_code: bool) -> PreTrainedModel:
    """The architecture of the model at ``path`` on the meta device, with its configuration for generation.

    Args:
        part: a key of ``CLASSES``; a critic has one output.
    """
    options = {"num_labels": 1} if part == "critic" else {}
    config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code, **options)
    with torch.device("meta"):
        model: PreTrainedModel = CLASSES[part].from_config(
            config, dtype=torch.float32, trust_remote_code=trust_remote_code
        )
    if model.can_generate():
        try:
            model.generation_config = GenerationSettings.from_pretrained(path)
        except OSError:  # without the file the architecture's own defaults hold, as when the model was loaded
            pass
    return model


def parameter_shapes(model: torch.nn.Module) -> dict[str, torch.Size]:
    """Name -> shape of every parameter; of tied ones the first name."""
    return {name: parameter.shape for name, parameter in model.named_parameters()}


def persistent_buffers(model: torch.nn.Module) -> dict[str, Tensor]:
    """Copies on the CPU of the tensors that belong to the model's weights without being parameters, by name.

    Most models have none; the mixtures of GLM 4 and DeepSeek V3 have one for each router. No step changes them.
    """
    saved = model.state_dict().keys()
    return {name: buffer.to("cpu", copy=True) for name, buffer in model.named_buffers() if name in saved}


def write_architecture(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, buffers: Mapping[str, Tensor]
) -> None:
    """Write what ``folder`` needs besides parameters.

    Configurations, tokenizer, the code that the model came with, and its ``buffers``, by :func:`persistent_buffers`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = model.config
    config.architectures = [type(model).__name__]
    if model.is_remote_code():
        custom_object_save(model, folder, config=config)
    config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if buffers:
        save_file(dict(buffers), folder / BUFFERS, metadata={"format": "pt"})


def read_buffers(folder: Path) -> dict[str, Tensor]:
    """The buffers in a folder of :func:`write_architecture`, by name."""
    return load_file(folder / BUFFERS) if (folder / BUFFERS).is_file() else {}


def write_huggingface(
    model: PreTrainedModel, weights: Mapping[str, Tensor], tokenizer: PreTrainedTokenizerBase, folder: Path
) -> None:
    """Write a folder that ``transformers`` and vLLM load as it is.

    Args:
        model: the architecture, such as from :func:`empty_model`; its own weights are not looked at.
        weights: every parameter by name, of tied ones the first, and the persistent buffers; on the CPU.
    """
    model.save_pretrained(folder, state_dict=dict(weights), safe_serialization=True)
    tokenizer.save_pretrained(folder)
