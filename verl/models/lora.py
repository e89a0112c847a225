"""Low-rank adapters (LoRA, arXiv 2106.09685), injected by peft without changing the model's class.

An adapted linear layer computes ``W x + scaling * B (A x)``. The layer's submodules are ``base_layer`` for ``W``,
``lora_A.default`` for ``A`` and ``lora_B.default`` for ``B``.

Training may start from an adapter saved by ``peft`` as ``adapter_config.json`` and ``adapter_model.safetensors``.
Adapter files are untrusted, so their content is validated before use.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from typing import Any

import peft
import torch
import torch.distributed as dist
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor, nn
from transformers import PreTrainedModel

from verl.config.common import ALL_LINEAR, ModelConfig
from verl.config.errors import ConfigError, in_one_line
from verl.models.info import VALUE_HEAD, tensor_shapes
from verl.models.offload import full_tensor, reshard
from verl.utils.files import FileRecord, file_record, write_recorded

ADAPTER = "default"
"""Name of the adapter in peft."""
WRAPPER = "base_model.model."
"""Prefix of parameter names in files saved by peft."""
OPTIONS, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

UNUSED = {
    *("base_model_name_or_path", "task_type", "inference_mode", "revision", "auto_mapping", "peft_version"),
    *("lora_dropout", "megatron_core", "qalora_group_size"),
}
"""Options that do not affect a trained adapter's output. All other options must have the values of plain LoRA."""
TRAINABLE_STARTS = (True, False, "gaussian")
"""Values of ``init_lora_weights`` for adapters that do not modify the base weights."""
MAX_SCALE = 10_000
"""Upper limit on ``lora_alpha / r`` and on its inverse. The ratio is usually between 0.5 and 4."""


def linear_layers(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """Return all linear layers except the output head, keyed by name."""
    head = model.get_output_embeddings() or getattr(model, VALUE_HEAD, None)
    return {
        name: module for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not head
    }


def adapter_options(model: PreTrainedModel, config: ModelConfig, prefix: str = "model") -> peft.LoraConfig:
    """Return the adapter config for ``model``, read from ``lora_adapter_path`` if set, otherwise from ``lora``.

    Raises ``ConfigError`` if the model lacks the target layers or the saved adapter cannot be used.
    """
    lora, saved = config.lora, config.lora_adapter_path
    if saved is not None:
        options = read_saved_adapter(saved, model, f"{prefix}.lora_adapter_path")
    else:
        targets, available = lora.target_modules, sorted({name.rpartition(".")[2] for name in linear_layers(model)})
        if targets == [ALL_LINEAR] and available:
            targets = available
        if unknown := sorted(set(targets) - set(available)):
            raise ConfigError(
                f"{prefix}.lora.target_modules={lora.target_modules!r}: {type(model).__name__} has no linear layers "
                f"called {', '.join(unknown)}; it has {', '.join(available) or 'none'}"
            )
        # peft declares lora_alpha as int but only divides it by the rank, so a float also works.
        options = peft.LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=targets)  # type: ignore[arg-type]
    options.lora_dropout = lora.dropout
    options.task_type = "TOKEN_CLS" if hasattr(model, VALUE_HEAD) else "CAUSAL_LM"
    options.base_model_name_or_path = config.path
    return options


def add_adapters(model: PreTrainedModel, config: ModelConfig) -> None:
    """Add adapters to ``model`` in place, on its device.

    Unless ``lora_adapter_path`` is set, ``A`` is initialized with torch's global random generator and ``B`` with 0,
    which leaves the model's output unchanged.
    """
    options, is_meta = adapter_options(model, config), model.device.type == "meta"
    peft.inject_adapter_in_model(options, model, ADAPTER, low_cpu_mem_usage=is_meta)
    if config.lora_adapter_path is not None and not is_meta:
        load_saved_adapter(config.lora_adapter_path, model, "model.lora_adapter_path")


def read_saved_adapter(folder: str, model: PreTrainedModel, field: str) -> peft.LoraConfig:
    """Check that the adapter saved in ``folder`` fits ``model`` and return its config.

    Raises a ``ConfigError`` that names ``field`` if a file is missing or broken, if the adapter is not plain LoRA, or
    if it belongs to a different model.
    """
    where = f"{field}={folder!r}"
    options = _read_options(Path(folder), where)
    targets: Any = options.target_modules
    layers = {name: layer for name, layer in linear_layers(model).items() if _is_target(name, targets)}
    if unmatched := [target for target in targets if not any(_is_target(name, [target]) for name in layers)]:
        raise ConfigError(f"{where}: {type(model).__name__} has no linear layers called {unmatched[0]}")
    expected = {}
    for name, layer in layers.items():
        expected[f"{WRAPPER}{name}.lora_A.weight"] = [options.r, layer.in_features]
        expected[f"{WRAPPER}{name}.lora_B.weight"] = [layer.out_features, options.r]
    shapes = tensor_shapes(Path(folder) / WEIGHTS, where)
    wrong = sorted(name for name in expected.keys() | shapes.keys() if expected.get(name) != shapes.get(name))
    if wrong:
        name = wrong[0]
        raise ConfigError(
            f"{where}: does not fit {type(model).__name__}: {name} has shape {shapes.get(name, 'none')}, expected "
            f"{expected.get(name, 'none')!s:.100} ({len(wrong)} such tensors); name the adapter of this model"
        )
    return options


@torch.no_grad()
def load_saved_adapter(folder: str, model: nn.Module, field: str) -> None:
    """Copy adapter weights that :func:`read_saved_adapter` has validated from ``folder`` into ``model``."""
    parameters = dict(model.named_parameters())
    with safe_open(Path(folder) / WEIGHTS, framework="pt") as file:
        for key in file.keys():  # noqa: SIM118  # not a mapping
            value = file.get_tensor(key).float()
            if not value.isfinite().all():
                raise ConfigError(f"{field}={folder!r}: {key} holds values that are not finite")
            path, _, leaf = key.removeprefix(WRAPPER).rpartition(".")
            parameters[f"{path}.{ADAPTER}.{leaf}"].copy_(value)


def _read_options(folder: Path, where: str) -> peft.LoraConfig:
    if not (folder / OPTIONS).is_file():  # peft would look on the hub.
        raise ConfigError(f"{where}: there is no {OPTIONS}; name the folder of an adapter that peft saved")
    try:
        saved: Any = peft.PeftConfig.from_pretrained(str(folder)).to_dict()
        plain: Any = peft.LoraConfig(
            r=saved["r"], lora_alpha=saved["lora_alpha"], target_modules=saved["target_modules"]
        )
    except Exception as error:  # The file may contain anything.
        raise ConfigError(f"{where}: {OPTIONS} does not describe a LoRA adapter: {in_one_line(error)}") from error
    expected: dict[str, Any] = plain.to_dict()
    if saved.get("init_lora_weights") in TRAINABLE_STARTS:
        saved["init_lora_weights"] = expected["init_lora_weights"]
    for name, value in saved.items():
        if name not in UNUSED and value != expected.get(name):
            raise ConfigError(f"{where}: {name}={value!r:.100}: only plain LoRA can be trained further")
    rank, alpha, targets = plain.r, plain.lora_alpha, plain.target_modules
    numbers = type(rank) is int and isinstance(alpha, int | float)
    if not (numbers and 0 < rank <= alpha * MAX_SCALE and alpha <= rank * MAX_SCALE):
        raise ConfigError(
            f"{where}: r={rank!r:.100}, lora_alpha={alpha!r:.100}: r must be a whole number of at least 1, and "
            f"lora_alpha / r from 1/{MAX_SCALE} to {MAX_SCALE}"
        )
    if not isinstance(targets, set) or not targets:
        raise ConfigError(f"{where}: target_modules={targets!r:.100}: must list the names of layers")
    return plain  # type: ignore[no-any-return]


def _is_target(name: str, targets: Iterable[str]) -> bool:
    return any(name == target or name.endswith(f".{target}") for target in targets)


def train_adapters_only(model: nn.Module) -> None:
    """Freeze all parameters except the adapters and the head of a value model."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_adapter(name) or name.startswith(f"{VALUE_HEAD}."))


def is_adapter(name: str) -> bool:
    return ".lora_A." in name or ".lora_B." in name


def base_parameter_name(name: str) -> str:
    """Return the name that a parameter has in the model without adapters."""
    return name.replace(".base_layer.", ".")


def is_adapted(name: str) -> bool:
    """Return whether the parameter ``name`` is a weight that has an adapter."""
    return name.endswith(".base_layer.weight")


def adapter_of(model: nn.Module, name: str) -> list[tuple[str, Tensor]]:
    """Return the names and values of ``A`` and ``B`` for the weight ``name``, or an empty list if it has no adapter."""
    if not is_adapted(name):
        return []
    path = name.removesuffix(".base_layer.weight")
    names = [f"{path}.{factor}.{ADAPTER}.weight" for factor in ("lora_A", "lora_B")]
    return [(factor, model.get_parameter(factor)) for factor in names]


def merged_weight(model: nn.Module, name: str, weight: Tensor, down: Tensor, up: Tensor) -> Tensor:
    """Return ``W + scaling * B A`` in float32, given the full ``W``, ``A`` and ``B`` of the parameter ``name``."""
    layer = model.get_submodule(name.removesuffix(".base_layer.weight"))
    assert isinstance(layer, LoraLayer), type(layer)
    return torch.addmm(weight.float(), up, down, alpha=layer.scaling[ADAPTER])


@contextmanager
def adapter_dropout(model: nn.Module, seed: int) -> Iterator[None]:
    """Enable adapter dropout (``lora.dropout``) inside the block, with a fixed ``seed``.

    Outside the block, models run without dropout, so that repeated forward passes of a policy give the same result.
    """
    adapters = [module for module in model.modules() if isinstance(module, LoraLayer)]
    layers = [drop for layer in adapters for drop in layer.lora_dropout.values() if isinstance(drop, nn.Dropout)]
    if not layers:
        yield
        return
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        for layer in layers:
            layer.train()
        try:
            yield
        finally:
            for layer in layers:
                layer.eval()


@contextmanager
def adapters_disabled(model: nn.Module) -> Iterator[None]:
    """Disable the adapters of ``model`` inside the block."""
    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def export_adapters(model: PreTrainedModel, folder: Path) -> dict[str, FileRecord]:
    """Write the adapters on rank 0 for ``peft.PeftModel.from_pretrained``. All ranks must call this function.

    Returns the files' records, keyed by name, on rank 0 and an empty dictionary on other ranks.
    """
    reshard(model)
    state = {
        # Parameter names in peft's files omit the adapter's name.
        f"{WRAPPER}{name.replace(f'.{ADAPTER}.', '.')}": full_tensor(parameter).cpu()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    records: dict[str, FileRecord] = {}
    if dist.get_rank() == 0:
        options = copy(model.peft_config[ADAPTER])
        assert isinstance(options, peft.LoraConfig)
        if hasattr(model, VALUE_HEAD):
            options.modules_to_save = [VALUE_HEAD]
        options.inference_mode = True
        options.save_pretrained(str(folder))
        records = {path.name: file_record(path) for path in folder.iterdir()}
        records[WEIGHTS] = write_recorded(folder / WEIGHTS, save(state, metadata={"format": "pt"}))
    dist.barrier()
    return records
