"""Starting LoRA from an adapter that ``peft`` saved: a folder with ``adapter_config.json`` and
``adapter_model.safetensors``. Both may come from anywhere, so all that they say is checked before it is used.
"""

import json
from pathlib import Path
from typing import Any

import peft
import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PreTrainedModel

from verl.config.errors import ConfigError
from verl.models.info import VALUE_HEAD

OPTIONS, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MAX_OPTIONS_BYTES = 1 << 20
WRAPPER = "base_model.model."
"""What peft puts before the names of parameters."""

READ = {"peft_type", "r", "lora_alpha", "target_modules", "init_lora_weights"}
"""Options of an adapter that are read."""
UNUSED = {
    *("base_model_name_or_path", "task_type", "inference_mode", "revision", "auto_mapping", "peft_version"),
    *("lora_dropout", "megatron_core", "qalora_group_size", "runtime_config"),
}
"""Options that say nothing about what a trained adapter computes. All others must be off. veRL saves ``runtime_config``
too, which peft leaves out."""
MAX_RANK = 1 << 20
MAX_SCALE = 1e4
"""The largest ``lora_alpha / r``, and the inverse of the smallest; common values are 0.5 to 4."""
NUMBERS = ("F64", "F32", "F16", "BF16")
"""Types of tensors that are read."""


def read_saved_adapter(folder: str, model: PreTrainedModel, field: str) -> peft.LoraConfig:
    """The rank, scale and layers of the adapter in ``folder``, which fits ``model``.

    Args:
        model: without adapters, on any device.
        field: the option that names the folder, for messages.

    Raises:
        ConfigError: a file is missing or broken, the adapter is not plain LoRA, or belongs to another model.
    """
    where = f"{field}={folder!r}"
    options = _read_options(Path(folder), where)
    rank, targets = options["r"], options["target_modules"]
    layers = {name: layer for name, layer in linear_layers(model).items() if _is_target(name, targets)}
    unmatched = [target for target in targets if not any(_is_target(name, [target]) for name in layers)]
    if unmatched:
        raise ConfigError(f"{where}: {type(model).__name__} has no linear layers called {', '.join(unmatched)}")
    expected = {}
    for name, layer in layers.items():
        expected[f"{WRAPPER}{name}.lora_A.weight"] = [rank, layer.in_features]
        expected[f"{WRAPPER}{name}.lora_B.weight"] = [layer.out_features, rank]
    found = _shapes(Path(folder), where)
    wrong = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    if wrong:
        name = wrong[0]
        raise ConfigError(
            f"{where}: does not fit {type(model).__name__}: {name} has shape {found.get(name, 'none')}, expected "
            f"{expected.get(name, 'none')} ({len(wrong)} such tensors); name the adapter of this model"
        )
    return peft.LoraConfig(r=rank, lora_alpha=options["lora_alpha"], target_modules=targets)


@torch.no_grad()
def load_saved_adapter(folder: str, model: nn.Module, adapter: str, field: str) -> None:
    """Copy the weights in ``folder``, checked by :func:`read_saved_adapter`, into the ``adapter`` of ``model``."""
    parameters = dict(model.named_parameters())
    with safe_open(Path(folder) / WEIGHTS, framework="pt") as file:
        for key in file.keys():  # noqa: SIM118  # not a mapping
            value = file.get_tensor(key).float()
            if not value.isfinite().all():
                raise ConfigError(f"{field}={folder!r}: {key} holds values that are not finite")
            path, _, leaf = key.removeprefix(WRAPPER).rpartition(".")
            parameters[f"{path}.{adapter}.{leaf}"].copy_(value)


def _read_options(folder: Path, where: str) -> dict[str, Any]:
    file = folder / OPTIONS
    if not file.is_file():
        raise ConfigError(f"{where}: there is no {OPTIONS}; name the folder of an adapter that peft saved")
    if file.stat().st_size > MAX_OPTIONS_BYTES:
        raise ConfigError(f"{where}: {OPTIONS} is larger than {MAX_OPTIONS_BYTES} bytes")
    try:
        options = json.loads(file.read_text())
    except (ValueError, RecursionError):
        raise ConfigError(f"{where}: {OPTIONS} is not JSON") from None
    if not isinstance(options, dict) or options.get("peft_type") != "LORA":
        raise ConfigError(f"{where}: {OPTIONS} does not describe a LoRA adapter")
    further = [name for name, value in options.items() if name not in READ | UNUSED and value and value != "none"]
    if further:
        raise ConfigError(f"{where}: {further[0]}={options[further[0]]!r:.100}: only plain LoRA can be trained further")
    _check_values(options, where)
    return options


def _check_values(options: dict[str, Any], where: str) -> None:
    rank, alpha, targets = (options.get(name) for name in ("r", "lora_alpha", "target_modules"))
    if type(rank) is not int or not 1 <= rank <= MAX_RANK:
        raise ConfigError(f"{where}: r={rank!r:.100}: must be a whole number of at least 1, and at most {MAX_RANK}")
    number = alpha if isinstance(alpha, int | float) and not isinstance(alpha, bool) else 0
    if not rank / MAX_SCALE <= number <= rank * MAX_SCALE:
        fix = f"must be a number above 0, and over r={rank} at most {MAX_SCALE:g} and at least its inverse"
        raise ConfigError(f"{where}: lora_alpha={alpha!r:.100}: {fix}")
    named = isinstance(targets, list) and targets and all(isinstance(name, str) and name for name in targets)
    if not named:
        raise ConfigError(f"{where}: target_modules={targets!r:.100}: must list the names of layers")
    start = options.get("init_lora_weights", True)
    if start not in (True, False, "gaussian"):
        raise ConfigError(f"{where}: init_lora_weights={start!r:.100}: such adapters change the model they start from")


def _shapes(folder: Path, where: str) -> dict[str, list[int]]:
    """The shape of each tensor; nothing else of the file is read."""
    if not (folder / WEIGHTS).is_file():
        raise ConfigError(f"{where}: there is no {WEIGHTS}; other formats may run code and are not read")
    try:
        with safe_open(folder / WEIGHTS, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  # not a mapping
            for name, tensor in slices.items():
                if tensor.get_dtype() not in NUMBERS:
                    kinds = ", ".join(NUMBERS)
                    raise ConfigError(f"{where}: {name} is of type {tensor.get_dtype()}; those read are {kinds}")
            return {name: list(tensor.get_shape()) for name, tensor in slices.items()}
    except SafetensorError as error:
        raise ConfigError(f"{where}: {WEIGHTS} is broken: {error}") from None


def linear_layers(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """The linear layers that can have an adapter, all but the output head, by name."""
    head = model.get_output_embeddings() or getattr(model, VALUE_HEAD, None)
    return {
        name: module for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not head
    }


def _is_target(name: str, targets: list[str]) -> bool:
    return any(name == target or name.endswith(f".{target}") for target in targets)
