"""Models as ``transformers`` and vLLM load them: folders in Hugging Face's layout, and models without weights."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from itertools import chain
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, PreTrainedModel, PreTrainedTokenizerBase
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
    revert_weight_conversion,
)
from transformers.dynamic_module_utils import custom_object_save

from verl.models.fsdp import full_parameters
from verl.models.gather import WeightDtype, keep_dtype
from verl.models.info import ModelInfo
from verl.models.lora import base_parameter_name, is_adapter

AUTO_CLASSES = {"actor": AutoModelForCausalLM, "critic": AutoModelForTokenClassification}
"""Part of a checkpoint -> the class that its model is loaded with."""

BUFFERS = "buffers.safetensors"
"""What holds a model's persistent buffers in a folder of its architecture; models without any have no such file."""


def empty_model(part: str, info: ModelInfo) -> PreTrainedModel:
    """The architecture of a model on the meta device, with its configuration for generation.

    Args:
        part: a key of ``AUTO_CLASSES``; a critic has one output.
    """
    model = info.meta_model(AUTO_CLASSES[part], num_labels=1 if part == "critic" else None)
    # Without the file the architecture's own defaults hold, as when the model was loaded.
    if model.can_generate() and info.generation_config is not None:
        model.generation_config = deepcopy(info.generation_config)
    # The model is float32 here; its files keep the precision that they came with.
    dtype = info.config.dtype
    model.config.dtype = dtype if dtype in (torch.bfloat16, torch.float16) else torch.float32
    return model


def persistent_buffers(model: torch.nn.Module) -> dict[str, Tensor]:
    """Copies on the CPU of the tensors that belong to the model's weights without being parameters, by name.

    Most models have none; the mixtures of GLM 4 and DeepSeek V3 have one for each router. No step changes them.
    """
    return {name: buffer.to("cpu", copy=True) for name, buffer in saved_buffers(model)}


def saved_buffers(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The tensors of :func:`persistent_buffers` themselves."""
    saved = model.state_dict().keys()
    return ((name, buffer) for name, buffer in model.named_buffers() if name in saved)


def checkpoint_parameters(
    model: PreTrainedModel, dtype: WeightDtype = keep_dtype, bucket_bytes: int = 0
) -> Iterator[tuple[str, Tensor]]:
    """Everything that the model's files hold, one tensor at a time; all ranks must iterate over it together.

    The parameters of :func:`verl.models.fsdp.full_parameters` under the files' names and in their pieces, and the
    buffers, which no step changes, but which an engine that slept has forgotten.
    """
    names = [base_parameter_name(name) for name in model.state_dict() if not is_adapter(name)]
    parameters = full_parameters(model, dtype, bucket_bytes)
    return in_checkpoint_format(model, names, chain(parameters, saved_buffers(model)))


def in_checkpoint_format(
    model: PreTrainedModel, names: Iterable[str], weights: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """``weights`` as the model's files have them, which ``transformers`` may have renamed, joined or cut on loading.

    What was cut from one tensor is kept until the last part comes; anything else goes out at once.

    Args:
        model: loaded by ``from_pretrained``, which notes there what it converted.
        names: of all ``weights``, and perhaps more.
        weights: full tensors by their name in ``model``.
    """
    target = names_in_files(model, names)
    num_parts = Counter(target.values())
    held: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for name, value in weights:
        parts = held[target[name]]
        parts[name] = value
        if len(parts) == num_parts[target[name]]:
            yield from revert_weight_conversion(model, held.pop(target[name])).items()
        # Free this tensor before the next one is gathered.
        del value, parts


def names_in_files(model: PreTrainedModel, names: Iterable[str]) -> dict[str, str]:
    """Name of a weight -> the name in the model's files of the tensor that it is a part of, or the first of those that
    it is made of.
    """
    conversions = getattr(model, "_weight_conversions", None)
    if conversions is None:  # not loaded by from_pretrained: what revert_weight_conversion then takes
        loading = get_model_conversion_mapping(model, add_legacy=False)
        conversions = [entry for entry in loading if not isinstance(entry, PrefixChange)]
    reverse = [conversion.reverse_transform() for conversion in reversed(conversions)]
    renamings = [conversion for conversion in reverse if isinstance(conversion, WeightRenaming)]
    converters = [conversion for conversion in reverse if isinstance(conversion, WeightConverter)]
    return {name: rename_source_key(name, renamings, converters, reverse=True)[0] for name in names}


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
        custom_object_save(model, folder, config=config)  # type: ignore[arg-type]  # declared dict, takes a config
    config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if buffers:
        save_file(dict(buffers), folder / BUFFERS, metadata={"format": "pt"})


def read_buffers(folder: Path) -> dict[str, Tensor]:
    """The buffers in a folder of :func:`write_architecture`, by name."""
    return load_file(folder / BUFFERS) if (folder / BUFFERS).is_file() else {}
