"""Writes and reads a worker's part of a checkpoint: its shards of the trained models, and its random generator states.

For each trained model (``actor``, ``critic``), a checkpoint contains a folder ``shards``, written by
``torch.distributed.checkpoint`` in safetensors format. The file headers contain the names and offsets of the stored
tensor pieces, so any number of workers can read the shards. All other files are JSON. Nothing is pickled or unpickled.
"""

import io
import json
import os
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from verl.checkpoint.folders import EXPORTED, attempt_of
from verl.config.common import ModelConfig
from verl.config.errors import ConfigError
from verl.models.fsdp import full_parameters
from verl.models.huggingface import WeightFiles, empty_model, saved_buffers, write_architecture
from verl.models.info import ModelInfo
from verl.models.learner import Learner
from verl.models.lora import export_adapters
from verl.models.offload import Offloaded, reshard
from verl.models.policy import Policy
from verl.utils.distributed import collective_timeout, seed_everything
from verl.utils.files import FileRecord, RecordedFile, file_record, naming_storage, write_recorded
from verl.utils.json_state import from_json, to_json
from verl.utils.process import return_freed_memory

MODEL = "model."
"""Prefix of parameter names in the shards."""
OPTIMIZER = "optimizer."
"""Prefix of the names of optimizer tensors, such as ``optimizer.<parameter>.exp_avg``."""
ADAPTERS = "lora_adapter"
"""Folder of LoRA adapters in PEFT format, next to the shards. With LoRA, the shards contain only the adapters."""
GATHER_BYTES = 1 << 28
"""Maximum size in bytes of the unsharded parameters that an export gathers at once."""
FILE_BYTES = 1 << 28
"""Size in bytes at which a worker starts a new file. Torch keeps two copies of each file while writing it."""


@dataclass(frozen=True)
class TrainedPart:
    """A trained model and everything that a checkpoint stores for it."""

    name: str
    """``actor`` or ``critic``. The part's folder in a checkpoint has the same name."""
    learner: Learner
    parameters: Offloaded
    """Parameters of the learner's model, which may be offloaded."""
    model: ModelConfig
    tokenizer: PreTrainedTokenizerBase


class CheckpointWorker:
    """Writes and reads one worker's share of each checkpoint. Every method must be called on all workers at once."""

    def __init__(self, parts: Sequence[TrainedPart], seed: int, averages: Mapping[str, Policy] | None = None) -> None:
        """Prepare to save ``parts``. The run's ``seed`` is used when resuming with a different number of workers.

        ``averages`` maps folder names to moving averages of the models' parameters.
        """
        self._parts = parts
        self._averages = averages or {}
        self._seed = seed
        # Use a separate group, so that messages of the background thread and of training do not mix.
        self._group = dist.new_group(backend="gloo", timeout=collective_timeout())
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[dict[str, FileRecord]] | None = None
        self._exports = {part.name: WeightFiles(empty_model(part.name, ModelInfo.of(part.model))) for part in parts}
        self._buffers = {part.name: _on_host(saved_buffers(part.learner.model)) for part in parts}

    def save(self, folder: Path, background: bool, huggingface: bool) -> None:
        """Start writing to ``folder``. Call :meth:`finish_save` to wait for completion.

        Args:
            background: Whether to copy everything to host memory first, so that training can continue immediately.
            huggingface: Whether to also write ``<part>/huggingface``. Each worker then gathers the weights of its share
                of these files in host memory.
        """
        assert self._writing is None or self._writing.done(), "the checkpoint before was not finished"
        # On a CPU, the copies need memory that the allocator still holds for tensors of the last step.
        return_freed_memory()
        shards, weights, counts = {}, {}, {}
        records: dict[str, FileRecord] = {}
        for part in self._parts:
            with part.parameters.loaded(), part.learner.optimizer_state.loaded():
                state = training_state(part.learner)
                # Offloaded tensors leave the device again when this block ends.
                copied = background or part.parameters.enabled or part.learner.optimizer_state.enabled
                shards[part.name] = _on_host(state) if copied else state
                if huggingface:
                    weights[part.name] = self._gather_share(part)
                if part.model.trains_adapters:
                    assert isinstance(part.learner.model, PreTrainedModel)
                    adapters = export_adapters(part.learner.model, folder / part.name / ADAPTERS)
                    records |= _within(f"{part.name}/{ADAPTERS}", adapters)
            counts[part.name] = part.learner.scheduler.last_epoch
        for name, average in self._averages.items():
            with average.parameters.loaded():
                state = trained_parameters(average.model)
                shards[name] = _on_host(state) if background or average.parameters.enabled else state
        generators = json.dumps(to_json(generator_states()))
        needed = sum(tensor.nbytes for tensors in (*shards.values(), *weights.values()) for tensor in tensors.values())
        write = naming_storage(folder.parent, needed)(self._write)
        self._writing = self._thread.submit(write, folder, shards, weights, counts, generators, records)

    def finish_save(self, wait: bool) -> dict[str, FileRecord] | None:
        """Return records of the files written by this worker, or None if it has not finished and ``wait`` is False.

        Raises:
            Exception: If writing failed on this worker or in the exchange with other workers.
        """
        assert self._writing is not None, "no checkpoint was begun"
        if not wait and not self._writing.done():
            return None
        return self._writing.result()

    def load(self, folder: Path, step: int) -> None:
        """Restore the checkpoint of ``step``, which may have been written by any number of workers.

        Optimizers and schedules keep the configured hyperparameters. Only their progress is restored. Random generators
        are restored if the number of workers is unchanged, and otherwise seeded with the run's seed plus ``step``.
        Raises ``ConfigError`` if the architecture of a model differs from the checkpoint's.
        """
        for part in self._parts:
            with part.parameters.loaded(), part.learner.optimizer_state.loaded():
                load_training_state(part.learner, folder / part.name / "shards", self._group)
            schedule = json.loads((folder / part.name / "scheduler.json").read_text())
            _set_schedule(part.learner, schedule["optimizer_steps"])
        for name, average in self._averages.items():
            if (folder / name).is_dir():  # required unless the run only validates
                with average.parameters.loaded():
                    load_shards(trained_parameters(average.model), folder / name / "shards", self._group)
        files = sorted((folder / "generators").glob("*.json"))
        if len(files) == dist.get_world_size():
            set_generator_states(from_json(json.loads(files[dist.get_rank()].read_text())))
        else:
            seed_everything((self._seed + step) % 2**32)

    def _write(
        self,
        folder: Path,
        shards: Mapping[str, dict[str, Tensor]],
        weights: Mapping[str, Mapping[str, Tensor]],
        counts: Mapping[str, int],
        generators: str,
        records: dict[str, FileRecord],
    ) -> dict[str, FileRecord]:
        """Write this worker's files, add their records to ``records``, and return ``records``."""
        rank = dist.get_rank()
        attempt_of(folder).check(folder)
        for name, tensors in shards.items():
            numbers = file_numbers(tensors, dist.get_world_size() * FILE_BYTES)
            writer = HuggingFaceStorageWriter(str(folder / name / "shards"), numbers, save_distributed=True)
            writer.fs = files = RecordingFiles()
            state_dict_saver.save(tensors, storage_writer=writer, process_group=self._group)
            records |= _within(f"{name}/shards", files.records)
        for part in self._parts:
            target = folder / part.name
            if rank == 0:
                text = json.dumps({"optimizer_steps": counts[part.name]}) + "\n"
                records[f"{part.name}/scheduler.json"] = write_recorded(target / "scheduler.json", text.encode())
                self._write_architecture(part, target / "architecture", self._buffers[part.name])
                records |= _within(f"{part.name}/architecture", _read_records(target / "architecture"))
            if part.name in weights:
                exported = self._write_export(part, target / EXPORTED, weights[part.name])
                records |= _within(f"{part.name}/{EXPORTED}", exported)
        (folder / "generators").mkdir(exist_ok=True)
        name = f"generators/rank_{rank:05d}.json"
        records[name] = write_recorded(folder / name, f"{generators}\n".encode())
        return records

    def _write_export(self, part: TrainedPart, target: Path, weights: Mapping[str, Tensor]) -> dict[str, FileRecord]:
        """Write this worker's share of the weights to a model folder and, on worker 0, all other files of the model."""
        rank, files = dist.get_rank(), self._exports[part.name]
        target.mkdir(exist_ok=True)
        records = {}
        if rank == 0:
            self._write_architecture(part, target, {})
            # Other workers may already be writing weights to this folder.
            records = _read_records(target, files.files)
            records |= files.write_index(target)
        for file in files.share(rank, dist.get_world_size()):
            records[file] = files.write(file, weights, target)
        return records

    def _write_architecture(self, part: TrainedPart, target: Path, buffers: Mapping[str, Tensor]) -> None:
        write_architecture(self._exports[part.name].model, part.tokenizer, target, buffers)

    def _gather_share(self, part: TrainedPart) -> dict[str, Tensor]:
        """Gather this worker's share of an export in host memory: full parameters with merged adapters, and buffers."""
        files = self._exports[part.name]
        mine = {name for file in files.share(dist.get_rank(), dist.get_world_size()) for name in files.files[file]}
        kept = {name: buffer for name, buffer in self._buffers[part.name].items() if name in mine}
        for name, value in full_parameters(part.learner.model, files.sent_dtype, GATHER_BYTES):
            if name in mine:
                kept[name] = value.to("cpu", copy=True)
        return kept


class RecordingFiles(FileSystem):
    """File system for ``torch.distributed.checkpoint`` that computes each file's record while the file is written."""

    def __init__(self) -> None:
        self.records: dict[str, FileRecord] = {}
        """Maps each file name to the file's size and checksum."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        """Open a file for writing, and store its record when it is closed."""
        assert mode == "wb", mode
        with RecordedFile(Path(path)) as stream:
            yield stream
        self.records[Path(path).name] = stream.record


def file_numbers(tensors: Mapping[str, Tensor], num_bytes: int) -> dict[str, int]:
    """Map each tensor name to a file number, starting at 1. A new file starts every ``num_bytes`` bytes."""
    numbers, total = {}, 0
    # Sort the names, because a resumed optimizer has its tensors in a different order.
    for name in sorted(tensors):
        numbers[name] = 1 + total // num_bytes
        total += tensors[name].nbytes
    return numbers


def training_state(learner: Learner) -> dict[str, Tensor]:
    """Return the tensors that training changes, without copying them: trained parameters and optimizer moments.

    Tied parameters are included once, and frozen parameters are omitted. There are no moments before the optimizer's
    first step. ``torch.distributed.checkpoint.state_dict`` would create them, but by a counted step on zero gradients.
    """
    state = trained_parameters(learner.model)
    for name, parameter in learner.model.named_parameters():
        for key, value in learner.optimizer.state.get(parameter, {}).items():
            state[f"{OPTIMIZER}{name}.{key}"] = value
    return state


def trained_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Return the trained parameters, without copying them, keyed by their names in the shards."""
    reshard(model)
    return {MODEL + name: value.detach() for name, value in model.named_parameters() if value.requires_grad}


def load_training_state(learner: Learner, folder: Path, group: dist.ProcessGroup | None) -> None:
    """Restore the tensors of :func:`training_state` in place from the shards in ``folder``.

    Raises ``ConfigError`` if the shards belong to a different architecture.
    """
    saved = saved_shapes(folder)
    learner.optimizer.state.clear()
    state = training_state(learner)
    check_same_architecture(folder, saved, {n.removeprefix(MODEL): t.shape for n, t in state.items()})
    for name, parameter in learner.model.named_parameters():
        prefix = f"{OPTIMIZER}{name}."
        for full_name, shape in saved.items():
            if full_name.startswith(prefix) and "." not in full_name.removeprefix(prefix):
                # A moment is sharded like its parameter, while AdamW keeps the step count on the host.
                value = torch.zeros_like(parameter.detach()) if shape == parameter.shape else torch.zeros(shape)
                learner.optimizer.state[parameter][full_name.removeprefix(prefix)] = value
                state[full_name] = value
    load_shards(state, folder, group)


def load_shards(state: dict[str, Tensor], folder: Path, group: dist.ProcessGroup | None) -> None:
    """Restore the tensors in ``state`` in place from the shards in ``folder``."""
    state_dict_loader.load(state, storage_reader=HuggingFaceStorageReader(str(folder)), process_group=group)


def saved_shapes(folder: Path) -> dict[str, torch.Size]:
    """Return the shapes of all tensors in the shards, read from the file headers and keyed by name.

    Raises ``ConfigError`` if the headers cannot be read.
    """
    try:
        metadata = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    except Exception as error:  # of any type, because torch does not validate the headers
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise ConfigError(f"{folder}: the shards cannot be read: {reason:.200}; use another checkpoint") from error
    return {name: entry.size for name, entry in metadata.items() if isinstance(entry, TensorStorageMetadata)}


def check_same_architecture(folder: Path, saved: Mapping[str, torch.Size], expected: Mapping[str, torch.Size]) -> None:
    """Check that the parameters in ``saved``, as returned by :func:`saved_shapes`, match ``expected``.

    The names in ``expected`` have no prefix, unlike those in ``saved``. Raises ``ConfigError`` if names or shapes
    differ. The message names the first parameter that differs.
    """
    stored = {name.removeprefix(MODEL): shape for name, shape in saved.items() if name.startswith(MODEL)}
    for name in sorted(stored.keys() | expected.keys()):
        if stored.get(name) != expected.get(name):
            there, here = (
                f"has shape {list(shapes[name])}" if name in shapes else "is missing" for shapes in (stored, expected)
            )
            raise ConfigError(f"{folder}: another architecture: {name} {there} there and {here} in the run's model")


def generator_states() -> dict[str, Any]:
    """Return the states of the global random generators of Python, NumPy and torch."""
    states = {"python": random.getstate(), "numpy": np.random.get_state(legacy=False), "torch": torch.get_rng_state()}
    return states | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_initialized() else {})


def set_generator_states(states: Mapping[str, Any]) -> None:
    """Restore the states returned by :func:`generator_states` after a round trip through JSON."""
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    stream = states["numpy"]
    np.random.set_state(stream | {"state": stream["state"] | {"key": stream["state"]["key"].numpy()}})
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def _on_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of the tensors in host memory."""
    return {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}


def _within(folder: str, records: Mapping[str, FileRecord]) -> dict[str, FileRecord]:
    return {f"{folder}/{name}": record for name, record in records.items()}


def _read_records(folder: Path, without: Collection[str] = ()) -> dict[str, FileRecord]:
    """Return the records of the small files written by libraries: configs, tokenizers and code."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name not in without)
    return {path.relative_to(folder).as_posix(): file_record(path) for path in files}


def _set_schedule(learner: Learner, optimizer_steps: int) -> None:
    scheduler = learner.scheduler
    scheduler.last_epoch = optimizer_steps
    factors = [factor(optimizer_steps) for factor in scheduler.lr_lambdas]
    rates = [base * factor for base, factor in zip(scheduler.base_lrs, factors, strict=True)]
    for group, rate in zip(learner.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    scheduler._last_lr = rates
