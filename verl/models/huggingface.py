"""Reads and writes models in the Hugging Face layout, independently of the number of processes."""

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

AUTO_CLASSES = {
    "actor": AutoModelForCausalLM,
    "critic": AutoModelForTokenClassification,
    "teacher": AutoModelForCausalLM,
}
"""Auto class of ``transformers`` for each checkpoint part."""

BUFFERS = "buffers.safetensors"
"""Name of the file in which :func:`write_architecture` stores a model's persistent buffers, if it has any."""

FILE_BYTES = 1 << 30
"""Target size of weight files in bytes, small enough to balance the load between writers."""


def empty_model(part: str, info: ModelInfo) -> PreTrainedModel:
    """Create a model on the meta device, without weights but with its generation config.

    Args:
        part: key of ``AUTO_CLASSES``; a critic has one output.
    """
    model = info.meta_model(AUTO_CLASSES[part], num_labels=1 if part == "critic" else None)
    if model.can_generate() and info.generation_config is not None:
        model.generation_config = deepcopy(info.generation_config)
    # The model is float32 here, but its files keep the original precision.
    dtype = info.config.dtype
    model.config.dtype = dtype if dtype in (torch.bfloat16, torch.float16) else torch.float32
    return model


def saved_buffers(model: torch.nn.Module) -> dict[str, Tensor]:
    """Return a model's persistent buffers, such as router biases in GLM 4 and DeepSeek V3, keyed by name.

    Training does not change these buffers.
    """
    saved = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in saved}


def checkpoint_parameters(
    model: PreTrainedModel, dtype: WeightDtype = keep_dtype, bucket_bytes: int = 0
) -> Iterator[tuple[str, Tensor]]:
    """Yield the model's tensors as stored in its files (:func:`in_checkpoint_format`). All ranks must iterate together.

    Buffers are included because an engine loses them when it sleeps.
    """
    names = [base_parameter_name(name) for name in model.state_dict() if not is_adapter(name)]
    parameters = full_parameters(model, dtype, bucket_bytes)
    return in_checkpoint_format(model, names, chain(parameters, saved_buffers(model).items()))


def in_checkpoint_format(
    model: PreTrainedModel, names: Iterable[str], weights: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Yield ``weights`` in the format of the model's files, undoing the conversions made on loading.

    Parameters that form one tensor in the files are buffered until all have arrived. All other parameters are yielded
    immediately. The experts of a layer, which are separate tensors in the files, remain stacked, ``[E, ...]``. A Python
    loop over experts would take longer than copying them. ``*`` in a name stands for the expert index.

    Args:
        model: model loaded by ``from_pretrained``, which records its conversions.
        names: names of all tensors in ``weights``; additional names are allowed.
        weights: full tensors with their names in ``model``.
    """
    target, stacks = names_and_stacks(model, names)
    num_parts = Counter(target.values())
    pending: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for name, value in weights:
        parts = pending[target[name]]
        parts[name] = value
        if len(parts) == num_parts[target[name]]:
            complete = pending.pop(target[name])
            if name in stacks:
                yield from zip(stacks[name], value.chunk(len(stacks[name]), dim=1), strict=True)
            else:
                yield from revert_weight_conversion(model, complete).items()
            del complete
        # Free this tensor before the next one is gathered.
        del value, parts


def one_by_one(name: str, value: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield a weight from :func:`in_checkpoint_format`, splitting stacked experts as in the model's files."""
    if "*" not in name:
        yield name, value
        return
    for expert, weight in enumerate(value.unbind()):
        yield name.replace("*", str(expert)), weight


def names_and_stacks(model: PreTrainedModel, names: Iterable[str]) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Return each weight's first or only name in the model's files, and the name patterns of stacked expert weights.

    A weight that stacks the experts of a layer, ``[E, ...]``, has one pattern, or two if it concatenates the gate and
    up projections. In a pattern, ``*`` stands for the expert index.
    """
    conversions = getattr(model, "_weight_conversions", None)
    if conversions is None:  # Not loaded by from_pretrained: use the defaults of revert_weight_conversion.
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
            patterns = converter.target_patterns
            stacks[name] = [in_files[name].replace(patterns[0], pattern) for pattern in patterns]
    return in_files, stacks


def write_architecture(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, buffers: Mapping[str, Tensor]
) -> None:
    """Write everything except the parameters: configs, tokenizer, model code, and ``buffers``."""
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
    """Return the buffers in a folder written by :func:`write_architecture`, keyed by name."""
    return load_file(folder / BUFFERS) if (folder / BUFFERS).is_file() else {}


class WeightFiles:
    """Assignment of weights to the files of an export, which depends only on the model."""

    def __init__(self, model: PreTrainedModel, file_bytes: int = FILE_BYTES) -> None:
        """Assign the weights of ``model``, created by :func:`empty_model`, to files of about ``file_bytes`` bytes."""
        self.model = model
        parameters = dict(model.named_parameters())
        self.shapes = parameters | saved_buffers(model)
        """Tensors to write, keyed by name, on the meta device. Only the first of several tied tensors is included."""
        dtype = model.config.dtype
        assert isinstance(dtype, torch.dtype), dtype
        # Keep the head of a value model, and weights that transformers loads in float32, in float32.
        exact = model._get_dtype_plan(dtype)
        self.dtypes = {name: value.dtype for name, value in self.shapes.items()}
        """Dtype of each weight in the files, by name."""
        for name in parameters:
            if not (name.startswith(f"{VALUE_HEAD}.") or any(part in name for part in exact)):
                self.dtypes[name] = _narrower(dtype, self.dtypes[name])
        self.files = self._cut(file_bytes)
        """Names of the weights in each file."""

    def _cut(self, file_bytes: int) -> dict[str, list[str]]:
        # Weights that share a tensor must be written by one process.
        groups: dict[str, list[str]] = defaultdict(list)
        for name, in_file in names_and_stacks(self.model, self.shapes)[0].items():
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
        """Return the total size in bytes of the weights ``names`` in the files."""
        return sum(self.shapes[name].numel() * self.dtypes[name].itemsize for name in names)

    def share(self, rank: int, world_size: int) -> list[str]:
        """Return the files that ``rank`` writes. Files, largest first, go to the rank with the fewest bytes so far."""
        loads = [0] * world_size
        shares: list[list[str]] = [[] for _ in range(world_size)]
        for file in sorted(self.files, key=lambda file: -self.num_bytes(self.files[file])):
            least = loads.index(min(loads))
            loads[least] += self.num_bytes(self.files[file])
            shares[least].append(file)
        return shares[rank]

    def sent_dtype(self, name: str, value: Tensor) -> torch.dtype:
        """Return the narrower of the value's and the file's dtype. Implements :data:`verl.models.fsdp.WeightDtype`."""
        return _narrower(self.dtypes[name], value.dtype)

    def write(self, file: str, weights: Mapping[str, Tensor], folder: Path) -> FileRecord:
        """Write one file. ``weights`` must be on the CPU and include all weights that belong in the file."""
        state = {name: weights[name].to(self.dtypes[name]) for name in self.files[file]}
        content = {name: value.contiguous() for name, value in self._in_files(state).items()}
        return write_recorded(folder / file, save(content, metadata={"format": "pt"}))

    def write_index(self, folder: Path) -> dict[str, FileRecord]:
        """Write the tensor index if there are several files, and return the index file's record, keyed by file name."""
        if len(self.files) == 1:
            return {}
        weight_map: dict[str, str] = {}
        for file, names in self.files.items():
            weight_map |= dict.fromkeys(self._in_files({name: self.shapes[name].detach() for name in names}), file)
        index = {"metadata": {"total_size": self.num_bytes(self.shapes)}, "weight_map": weight_map}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        return {SAFE_WEIGHTS_INDEX_NAME: write_recorded(folder / SAFE_WEIGHTS_INDEX_NAME, text.encode())}

    def _in_files(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        ignored = set(self.model._keys_to_ignore_on_save or ())
        saved = {name: value for name, value in state.items() if name not in ignored}
        return dict(revert_weight_conversion(self.model, saved))


def _narrower(first: torch.dtype, second: torch.dtype) -> torch.dtype:
    return first if first.itemsize < second.itemsize else second


def write_huggingface(
    model: PreTrainedModel, weights: Mapping[str, Tensor], tokenizer: PreTrainedTokenizerBase, folder: Path
) -> None:
    """Write a model in ``model.config.dtype`` to a folder that ``transformers`` and vLLM can load.

    Args:
        model: model created by :func:`empty_model`.
        weights: all persistent buffers and parameters (only the first of several tied ones) by name, on the CPU.
    """
    write_architecture(model, tokenizer, folder, {})
    files = WeightFiles(model)
    for file in files.files:
        files.write(file, weights, folder)
    files.write_index(folder)
