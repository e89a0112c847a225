"""A model's weights in safetensors files: which file holds what, however many processes write them."""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from verl.models.huggingface import names_in_files, saved_buffers, write_architecture
from verl.models.info import VALUE_HEAD
from verl.utils.files import FileRecord, write_recorded

FILE_BYTES = 1 << 30
"""Most bytes of weights in a file, unless parameters that the files cut or join in one piece have more.

Small enough that the workers of a large model get about as much to write each.
"""


class WeightFiles:
    """The plan of an export: file -> its weights. It depends on the model alone, never on who writes."""

    def __init__(self, model: PreTrainedModel, file_bytes: int = FILE_BYTES) -> None:
        """
        Args:
            model: the architecture on the meta device, from :func:`verl.models.huggingface.empty_model`.
        """
        self.model = model
        self.shapes = dict(model.named_parameters()) | dict(saved_buffers(model))
        """By name, the tensors to be written; of tied ones the first."""
        parameters = {name for name, _ in model.named_parameters()}
        own = model.config.dtype
        assert isinstance(own, torch.dtype), own
        kept = model._get_dtype_plan(own)
        self.dtypes = {
            # transformers raises what it keeps in float32 on loading, and a value's head is computed in it.
            name: value.dtype
            if name not in parameters or name.startswith(f"{VALUE_HEAD}.") or any(part in name for part in kept)
            else _narrower(own, value.dtype)
            for name, value in self.shapes.items()
        }
        """By name, the precision that they are written in."""
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
        """The files that one of several processes writes: each of the largest ones goes to who has least so far."""
        loads = [0] * world_size
        shares: list[list[str]] = [[] for _ in range(world_size)]
        for file in sorted(self.files, key=lambda file: -self.num_bytes(self.files[file])):
            least = loads.index(min(loads))
            loads[least] += self.num_bytes(self.files[file])
            shares[least].append(file)
        return shares[rank]

    def travel_dtype(self, name: str, value: Tensor) -> torch.dtype:
        """A :data:`verl.models.gather.WeightDtype`: as in the file where that is narrower."""
        return _narrower(self.dtypes[name], value.dtype)

    def write(self, file: str, weights: Mapping[str, Tensor], folder: Path) -> FileRecord:
        """Write one of the files, in the names and pieces that the model's files have.

        Args:
            weights: on the CPU, at least those of the file.
        """
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
        found: dict[str, Tensor] = revert_weight_conversion(self.model, written)
        return found


def _narrower(first: torch.dtype, second: torch.dtype) -> torch.dtype:
    return first if first.itemsize < second.itemsize else second


def write_huggingface(
    model: PreTrainedModel, weights: Mapping[str, Tensor], tokenizer: PreTrainedTokenizerBase, folder: Path
) -> None:
    """Write a folder that ``transformers`` and vLLM load directly, in the precision that ``model.config.dtype`` names.

    Args:
        model: the architecture from :func:`verl.models.huggingface.empty_model`.
        weights: every parameter by name, of tied ones the first, and the persistent buffers; on the CPU.
    """
    write_architecture(model, tokenizer, folder, {})
    files = WeightFiles(model)
    for file in files.files:
        files.write(file, weights, folder)
    files.write_index(folder)
