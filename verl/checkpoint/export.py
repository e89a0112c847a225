"""Exports a checkpoint's shards to a model folder in a single process."""

import shutil
import uuid
from pathlib import Path

import torch
from peft import PeftConfig, PeftModel
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

from verl.checkpoint.folders import latest_checkpoint, refuse_verl_shards, step_of, verify_checkpoint
from verl.checkpoint.shards import ADAPTERS, MODEL, check_same_architecture, saved_shapes
from verl.config.errors import ConfigError
from verl.models.huggingface import AUTO_CLASSES, empty_model, read_buffers, write_huggingface
from verl.models.info import ModelInfo
from verl.models.tokenizer import load_tokenizer
from verl.utils.files import naming_storage


def export_checkpoint(
    source: Path, out: Path | None, part: str, trust_remote_code: bool, dtype: torch.dtype | None = None
) -> Path:
    """Write a checkpoint's model to a folder that ``transformers`` and vLLM can load, and return the folder.

    LoRA adapters are merged into the model and also written to the subfolder ``lora_adapter/``. Raises ``ConfigError``
    if there is no intact checkpoint, if it lacks parts of the model, or if ``out`` exists.

    Args:
        source: Checkpoint to export, or the folder of a run whose latest checkpoint is exported.
        out: New folder to write to, or None for ``<checkpoint>/<part>/huggingface``.
        part: Model to export, ``actor`` or ``critic``.
        dtype: Dtype of the exported weights (float32 in checkpoints), or None for the initial model's dtype.
    """
    folder = source.resolve()
    refuse_verl_shards(str(folder), folder / part)
    if step_of(folder) is None:
        latest = latest_checkpoint(folder)
        if latest is None:
            raise ConfigError(f"{source}: neither a checkpoint (.../global_step_N) nor a folder that has one")
        folder = latest
    verify_checkpoint(folder)
    if not (folder / part).is_dir():
        raise ConfigError(f"{folder}: has no {part}")
    target = folder / part / "huggingface" if out is None else out
    if target.exists():
        raise ConfigError(f"{target}: already exists; name another folder with --out")
    architecture = folder / part / "architecture"
    model = empty_model(part, ModelInfo.read(str(architecture), trust_remote_code))
    model.config.dtype = dtype or model.config.dtype
    adapters = folder / part / ADAPTERS if (folder / part / ADAPTERS).is_dir() else None
    if adapters:
        weights = merged_parameters(adapters, part, trust_remote_code)
    else:
        shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        weights = read_parameters(folder / part / "shards", shapes)
    weights |= read_buffers(architecture)
    unfinished = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.unfinished")
    try:
        tokenizer = load_tokenizer(str(architecture), trust_remote_code, needs_chat_template=False)
        with naming_storage(target.parent, sum(tensor.nbytes for tensor in weights.values())):
            write_huggingface(model, weights, tokenizer, unfinished)
            if adapters:
                # Next to the weights, transformers would apply the adapters again.
                shutil.copytree(adapters, unfinished / ADAPTERS)
            unfinished.rename(target)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    return target


def merged_parameters(adapters: Path, part: str, trust_remote_code: bool) -> dict[str, Tensor]:
    """Return the parameters of the adapters' base model, with the adapters merged into them.

    Raises ``ConfigError`` if the base model cannot be loaded from the path that training used.
    """
    base = PeftConfig.from_pretrained(str(adapters)).base_model_name_or_path
    options = {"num_labels": 1} if part == "critic" else {}
    try:
        model = AUTO_CLASSES[part].from_pretrained(
            base, dtype=torch.float32, trust_remote_code=trust_remote_code, **options
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"{base}: the base model of {adapters} cannot be loaded: {error}") from error
    merged = PeftModel.from_pretrained(model, str(adapters)).merge_and_unload()
    return {name: parameter.detach() for name, parameter in merged.named_parameters()}


def read_parameters(shards: Path, expected: dict[str, torch.Size]) -> dict[str, Tensor]:
    """Return all parameters stored in ``shards``, unsharded and on the CPU, keyed by name.

    Raises ``ConfigError`` if the names and shapes of the parameters do not match ``expected``.
    """
    saved = saved_shapes(shards)
    check_same_architecture(shards, saved, expected)
    state = {MODEL + name: torch.zeros(shape) for name, shape in expected.items()}
    state_dict_loader.load(state, storage_reader=HuggingFaceStorageReader(str(shards)), no_dist=True)
    return {name.removeprefix(MODEL): value for name, value in state.items()}
