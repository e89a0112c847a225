"""Models in Hugging Face's layout: their folders, which file holds what, and models without weights.

The layout does not depend on how many processes write it.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from itertools import chain
from pathlib import Path

import torch
from safetensors.torch import load_file, save, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, PreTrainedModel, PreTrainedTokenizerBase
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Chunk,
    PrefixChange,
    SplitModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
    revert_weight_conversion,
)
from transformers.dynamic_module_utils import custom_object_save
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from verl.models.fsdp import WeightDtype, full_parameters, keep_dtype
from verl.models.info import VALUE_HEAD, ModelInfo
from verl.models.lora import base_parameter_name, is_adapter
from verl.utils.files import FileRecord, write_recorded

AUTO_CLASSES = {"actor": AutoModelForCausalLM, "critic": AutoModelForTokenClassification}
"""Part of a checkpoint -> the class that its model is loaded with."""

BUFFERS = "buffers.safetensors"
"""File of a model's persistent buffers in a folder of its architecture; models without any have no such file."""

FILE_BYTES = 1 << 30
"""Most bytes of weights in a file, unless parameters that the files cut or join in one piece have more.

Small enough that the workers of a large model get about as much to write each.
"""


def empty_model(part: str, info: ModelInfo) -> PreTrainedModel:
    """Return the architecture of a model on the meta device, with its configuration for generation.

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


def saved_buffers(model: torch.nn.Module) -> dict[str, Tensor]:
    """Return the tensors that belong to the weights without being parameters, by name.

    Most models have none; the mixtures of GLM 4 and DeepSeek V3 have one for each router. No step changes them.
    """
    saved = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in saved}


def checkpoint_parameters(
    model: PreTrainedModel, dtype: WeightDtype = keep_dtype, bucket_bytes: int = 0
) -> Iterator[tuple[str, Tensor]]:
    """Everything that the model's files hold, one tensor at a time; all ranks must iterate over it together.

    The parameters of :func:`verl.models.fsdp.full_parameters` by :func:`in_checkpoint_format`, and the buffers, which
    no step changes, but which an engine that slept has forgotten.
    """
    names = [base_parameter_name(name) for name in model.state_dict() if not is_adapter(name)]
    parameters = full_parameters(model, dtype, bucket_bytes)
    return in_checkpoint_format(model, names, chain(parameters, saved_buffers(model).items()))


def in_checkpoint_format(
    model: PreTrainedModel, names: Iterable[str], weights: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """``weights`` as the model's files have them, which ``transformers`` may have renamed, joined or cut on loading.

    What was cut from one tensor is kept until the last part comes; anything else goes out at once. The experts of a
    layer, of which the files have a tensor each, stay stacked, ``[E, ...]``, under a name with ``*`` for the number of
    the expert: one by one they would cost more Python than the copying takes.

    Args:
        model: loaded by ``from_pretrained``, which notes there what it converted.
        names: of all ``weights``, and perhaps more.
        weights: full tensors by their name in ``model``.
    """
    target, stacks = names_and_stacks(model, names)
    num_parts = Counter(target.values())
    held: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for name, value in weights:
        parts = held[target[name]]
        parts[name] = value
        if len(parts) == num_parts[target[name]]:
            complete = held.pop(target[name])
            if name in stacks:
                yield from zip(stacks[name], value.chunk(len(stacks[name]), dim=1), strict=True)
            else:
                yield from revert_weight_conversion(model, complete).items()
            del complete
        # Free this tensor before the next one is gathered.
        del value, parts


def one_by_one(name: str, value: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield a weight of :func:`in_checkpoint_format`; stacked experts one by one, as in the model's files."""
    if "*" not in name:
        yield name, value
        return
    for expert, weight in enumerate(value.unbind()):
        yield name.replace("*", str(expert)), weight


def names_in_files(model: PreTrainedModel, names: Iterable[str]) -> dict[str, str]:
    """Return, for each weight, the name of its tensor in the model's files.

    For a weight that is part of a tensor, it is that tensor; for one made of several, the first of them.
    """
    return names_and_stacks(model, names)[0]


def names_and_stacks(model: PreTrainedModel, names: Iterable[str]) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Return the names of :func:`names_in_files`, and the file names of stacked experts.

    For a weight that stacks the experts of a layer, ``[E, ...]``, these are the names of an expert's matrices, with
    ``*`` for its number: one, or gate and up, which the weight has one above the other.
    """
    conversions = getattr(model, "_weight_conversions", None)
    if conversions is None:  # not loaded by from_pretrained: what revert_weight_conversion then takes
        loading = get_model_conversion_mapping(model, add_legacy=False)
        conversions = [entry for entry in loading if not isinstance(entry, PrefixChange)]
    reverse = [conversion.reverse_transform() for conversion in reversed(conversions)]
    renamings = [conversion for conversion in reverse if isinstance(conversion, WeightRenaming)]
    converters = [conversion for conversion in reverse if isinstance(conversion, WeightConverter)]
    of_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    in_files: dict[str, str] = {}
    stacks: dict[str, list[str]] = {}
    for name in names:
        in_files[name], pattern = rename_source_key(name, renamings, converters, reverse=True)
        if pattern is None:
            continue
        converter = of_pattern[pattern]
        steps = [(type(step), getattr(step, "dim", None)) for step in converter.operations]
        if steps in ([(SplitModulelist, 0)], [(Chunk, 1), (SplitModulelist, 0)]):
            first = converter.target_patterns[0]
            stacks[name] = [in_files[name].replace(first, pattern) for pattern in converter.target_patterns]
    return in_files, stacks


def write_architecture(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, buffers: Mapping[str, Tensor]
) -> None:
    """Write what ``folder`` needs besides parameters.

    Configurations, tokenizer, the code that the model came with, and its ``buffers``, by :func:`saved_buffers`.
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
    """Return the buffers in a folder of :func:`write_architecture`, by name."""
    return load_file(folder / BUFFERS) if (folder / BUFFERS).is_file() else {}


class WeightFiles:
    """The plan of an export: file -> its weights. It depends on the model alone, never on who writes."""

    def __init__(self, model: PreTrainedModel, file_bytes: int = FILE_BYTES) -> None:
        """``model``: the architecture on the meta device, from :func:`empty_model`."""
        self.model = model
        parameters = dict(model.named_parameters())
        self.shapes = parameters | saved_buffers(model)
        """By name, the tensors to be written; of tied ones the first."""
        own = model.config.dtype
        assert isinstance(own, torch.dtype), own
        # transformers raises what it keeps in float32 on loading, and a value's head is computed in it.
        exact = model._get_dtype_plan(own)
        self.dtypes = {name: value.dtype for name, value in self.shapes.items()}
        """By name, the precision that they are written in."""
        for name in parameters:
            if not (name.startswith(f"{VALUE_HEAD}.") or any(part in name for part in exact)):
                self.dtypes[name] = _narrower(own, self.dtypes[name])
        self.files = self._cut(file_bytes)
        """File -> names of its weights."""

    def _cut(self, file_bytes: int) -> dict[str, list[str]]:
        # What the files have in one piece cannot be written by two processes.
        groups: dict[str, list[str]] = defaultdict(list)
        for name, in_file in names_in_files(self.model, self.shapes).items():
            groups[in_file].append(name)
        files: list[list[str]] = [[]]
        size = 0
        for names in groups.values():
            added = self.num_bytes(names)
            if files[-1] and size + added > file_bytes:
                files, size = [*files, []], 0
            files[-1] += names
            size += added
        if len(files) == 1:
            return {SAFE_WEIGHTS_NAME: files[0]}
        stem, suffix = Path(SAFE_WEIGHTS_NAME).stem, Path(SAFE_WEIGHTS_NAME).suffix
        return {f"{stem}-{i:05d}-of-{len(files):05d}{suffix}": names for i, names in enumerate(files, start=1)}

    def num_bytes(self, names: Iterable[str]) -> int:
        """Of these weights in their files."""
        return sum(self.shapes[name].numel() * self.dtypes[name].itemsize for name in names)

    def share(self, rank: int, world_size: int) -> list[str]:
        """Return the files that one of several processes writes: the largest go to the one with the least so far."""
        loads = [0] * world_size
        shares: list[list[str]] = [[] for _ in range(world_size)]
        for file in sorted(self.files, key=lambda file: -self.num_bytes(self.files[file])):
            least = loads.index(min(loads))
            loads[least] += self.num_bytes(self.files[file])
            shares[least].append(file)
        return shares[rank]

    def travel_dtype(self, name: str, value: Tensor) -> torch.dtype:
        """Return the file's type where it is narrower; a :data:`verl.models.fsdp.WeightDtype`."""
        return _narrower(self.dtypes[name], value.dtype)

    def write(self, file: str, weights: Mapping[str, Tensor], folder: Path) -> FileRecord:
        """Write one of the files; ``weights``: on the CPU, at least those of the file."""
        state = {name: weights[name].to(self.dtypes[name]) for name in self.files[file]}
        content = {name: value.contiguous() for name, value in self._in_files(state).items()}
        return write_recorded(folder / file, save(content, metadata={"format": "pt"}))

    def write_index(self, folder: Path) -> dict[str, FileRecord]:
        """Write which file has which tensor, if there are several; the file's record by its name."""
        if len(self.files) == 1:
            return {}
        places: dict[str, str] = {}
        for file, names in self.files.items():
            places |= dict.fromkeys(self._in_files({name: self.shapes[name].detach() for name in names}), file)
        index = {"metadata": {"total_size": self.num_bytes(self.shapes)}, "weight_map": places}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        return {SAFE_WEIGHTS_INDEX_NAME: write_recorded(folder / SAFE_WEIGHTS_INDEX_NAME, text.encode())}

    def _in_files(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        left_out = set(self.model._keys_to_ignore_on_save or ())
        written = {name: value for name, value in state.items() if name not in left_out}
        return dict(revert_weight_conversion(self.model, written))


def _narrower(first: torch.dtype, second: torch.dtype) -> torch.dtype:
    return first if first.itemsize < second.itemsize else second


def write_huggingface(
    model: PreTrainedModel, weights: Mapping[str, Tensor], tokenizer: PreTrainedTokenizerBase, folder: Path
) -> None:
    """Write a folder that ``transformers`` and vLLM load directly, in the precision that ``model.config.dtype`` names.

    Args:
        model: the architecture from :func:`empty_model`.
        weights: every parameter by name, of tied ones the first, and the persistent buffers; on the CPU.
    """
    write_architecture(model, tokenizer, folder, {})
    files = WeightFiles(model)
    for file in files.files:
        files.write(file, weights, folder)
    files.write_index(folder)
