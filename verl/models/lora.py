"""Low-rank adapters (LoRA, arXiv 2106.09685) through peft, inside a model that keeps its own class and names.

An adapted linear layer computes ``W x + scaling * B (A x)``. Below it, ``W`` is called ``base_layer``, ``A`` and ``B``
``lora_A.default`` and ``lora_B.default``.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from pathlib import Path

import peft
import torch
import torch.distributed as dist
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import save
from torch import Tensor, nn
from transformers import PreTrainedModel

from verl.config.common import ALL_LINEAR, LoraConfig, ModelConfig
from verl.config.errors import ConfigError
from verl.models.info import VALUE_HEAD
from verl.models.offload import full_tensor
from verl.models.saved_adapters import WEIGHTS, linear_layers, load_saved_adapter, read_saved_adapter
from verl.utils.files import FileRecord, file_record, write_recorded

ADAPTER = "default"
"""peft's name of the one adapter."""


def target_modules(model: PreTrainedModel, config: LoraConfig, prefix: str = "lora") -> list[str]:
    """The names of the layers that the option asks for; raises ``ConfigError`` if the model does not have them."""
    available = {name.rpartition(".")[2] for name in linear_layers(model)}
    if config.target_modules == [ALL_LINEAR] and available:
        return sorted(available)
    unknown = sorted(set(config.target_modules) - available)
    if unknown:
        raise ConfigError(
            f"{prefix}.target_modules={config.target_modules!r}: {type(model).__name__} has no linear layers called "
            f"{', '.join(unknown)}; it has {', '.join(sorted(available)) or 'none'}"
        )
    return config.target_modules


def adapter_options(model: PreTrainedModel, config: ModelConfig, prefix: str = "model") -> peft.LoraConfig:
    """The adapters that ``model`` gets, by the options or by the adapter that they start from.

    Raises:
        ConfigError: the model does not have their layers, or the saved adapter cannot be used.
    """
    lora, saved = config.lora, config.lora_adapter_path
    if saved is not None:
        options = read_saved_adapter(saved, model, f"{prefix}.lora_adapter_path")
    else:
        layers = target_modules(model, lora, f"{prefix}.lora")
        # declared int, only divided
        options = peft.LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=layers)  # type: ignore[arg-type]
    options.lora_dropout = lora.dropout
    options.task_type = "TOKEN_CLS" if hasattr(model, VALUE_HEAD) else "CAUSAL_LM"
    options.base_model_name_or_path = config.path
    return options


def add_adapters(model: PreTrainedModel, config: ModelConfig) -> None:
    """Give the layers of ``model`` adapters in place, on the device that it is on.

    Without ``lora_adapter_path`` ``A`` is drawn from torch's global generator and ``B`` is 0, so that the model
    computes what it did before.
    """
    options, empty = adapter_options(model, config), model.device.type == "meta"
    peft.inject_adapter_in_model(options, model, ADAPTER, low_cpu_mem_usage=empty)
    if config.lora_adapter_path is not None and not empty:
        load_saved_adapter(config.lora_adapter_path, model, ADAPTER, "model.lora_adapter_path")


def train_adapters_only(model: nn.Module) -> None:
    """Freeze everything but the adapters and a value model's head."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_adapter(name) or name.startswith(f"{VALUE_HEAD}."))


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name belongs to an adapter."""
    return ".lora_A." in name or ".lora_B." in name


def base_parameter_name(name: str) -> str:
    """What a parameter is called in the model as it was before :func:`add_adapters`."""
    return name.replace(".base_layer.", ".")


def is_adapted(name: str) -> bool:
    """Whether the parameter of this name is a weight with an adapter."""
    return name.endswith(".base_layer.weight")


def adapter_of(model: nn.Module, name: str) -> list[tuple[str, Tensor]]:
    """The names and parameters ``A`` and ``B`` of the adapter of the weight ``name``; none if it has no adapter."""
    if not is_adapted(name):
        return []
    path = name.removesuffix(".base_layer.weight")
    names = [f"{path}.{factor}.{ADAPTER}.weight" for factor in ("lora_A", "lora_B")]
    return [(factor, model.get_parameter(factor)) for factor in names]


def merged_weight(model: nn.Module, name: str, weight: Tensor, down: Tensor, up: Tensor) -> Tensor:
    """``W + scaling * B A`` in float32: ``weight`` as a model without adapters needs it.

    Args:
        name: the parameter's name in ``model``.
        weight, down, up: the whole of ``W``, ``A`` and ``B``.
    """
    layer = model.get_submodule(name.removesuffix(".base_layer.weight"))
    assert isinstance(layer, LoraLayer), type(layer)
    return torch.addmm(weight.float(), up, down, alpha=layer.scaling[ADAPTER])


@contextmanager
def adapter_dropout(model: nn.Module, seed: int) -> Iterator[None]:
    """Inside the block, adapters drop parts of their inputs (``lora.dropout``), the same parts for the same ``seed``.

    Outside a model computes without dropout, so that log-probabilities of one policy agree between forward passes.
    """
    layers = [layer for module in model.modules() if isinstance(module, LoraLayer) for layer in dropouts(module)]
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


def dropouts(layer: LoraLayer) -> list[nn.Dropout]:
    """The dropout of an adapted layer; none if it drops nothing."""
    return [module for module in layer.lora_dropout.values() if isinstance(module, nn.Dropout)]


@contextmanager
def adapters_disabled(model: nn.Module) -> Iterator[None]:
    """Inside the block, ``model`` computes what it computed before it got adapters."""
    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def save_adapters(model: PreTrainedModel, folder: Path) -> dict[str, FileRecord]:
    """Write what is trained as ``peft.PeftModel.from_pretrained`` loads it; all ranks must call it, rank 0 writes.

    Returns the record of each file by its name; none on other ranks.
    """
    state = {
        # peft leaves the adapter's name out and puts the name of its wrapper before.
        f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}": full_tensor(parameter).cpu()
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
        content = save(state, metadata={"format": "pt"})
        records[WEIGHTS] = write_recorded(folder / WEIGHTS, content)
    dist.barrier()
    return records
