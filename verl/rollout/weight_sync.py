"""Weights into a running vLLM engine: the precision they travel in, and their reload one parameter at a time."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from vllm import LLM
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.platforms import current_platform

from verl.models.fsdp import EngineDtype, name_tail
from verl.models.huggingface import one_by_one

PROJECTIONS = {
    "gate_proj.weight": ("w13_weight", "w1"),
    "up_proj.weight": ("w13_weight", "w3"),
    "down_proj.weight": ("w2_weight", "w2"),
    "w1.weight": ("w13_weight", "w1"),
    "w3.weight": ("w13_weight", "w3"),
    "w2.weight": ("w2_weight", "w2"),
}
"""An expert's projection in files of models -> vLLM's parameter for those of all experts, and its part of that."""


def engine_dtype(engine: LLM) -> EngineDtype:
    """Return the precision in which weights travel to this engine."""
    runner = _runner(engine)
    dtype: torch.dtype = runner.vllm_config.model_config.dtype
    parameters = runner.get_model().named_parameters()
    wider = [name for name, p in parameters if p.is_floating_point() and p.dtype.itemsize > dtype.itemsize]
    return EngineDtype(dtype, frozenset(map(name_tail, wider)))


def _runner(engine: LLM) -> Any:
    return engine.llm_engine.model_executor.driver_worker.worker.model_runner


def reload_weights(engine: LLM, parameters: Iterable[tuple[str, Tensor]]) -> None:
    """Replace the engine's weights and drop what was cached under the old ones.

    With tensor parallelism every process of the engine is given whole parameters, of which vLLM takes its slice.

    Args:
        parameters: by :func:`verl.models.huggingface.checkpoint_parameters`, which leaves experts stacked.

    Raises:
        RuntimeError: a parameter of the engine's was not among them; it is named.
    """
    runner = _runner(engine)
    model = runner.get_model()
    # Some layers and attention backends read the config while they prepare new weights, as they do when created.
    with set_current_vllm_config(runner.vllm_config):
        missing = _reload(runner, model, parameters)
        if missing:
            names = ", ".join(sorted(missing))
            raise RuntimeError(f"vLLM's {type(model).__name__} was not given {names}: it would sample with old weights")
        _refresh_tied_head(model)
        _pack_experts(model)
    if not engine.reset_prefix_cache():
        raise RuntimeError("vLLM kept its prefix cache after a weight update; are requests still running?")


def _reload(runner: Any, model: Any, parameters: Iterable[tuple[str, Tensor]]) -> set[str]:
    """Reload the weights, and return the names of the parameters that received none.

    vLLM only logs them. The names come from the model's own ``load_weights``; a model that does not report them (None)
    passes.
    """
    expected = {name for name, _ in model.named_parameters()}
    load_weights, received = model.load_weights, expected
    layers = _stacking_layers(model)

    def load_and_note(weights: Iterable[tuple[str, Tensor]]) -> set[str] | None:
        nonlocal received
        stacked: set[str] = set()
        loaded: set[str] | None = load_weights(_load_stacks(layers, weights, stacked))
        received = expected if loaded is None else {*loaded, *stacked}
        return None if loaded is None else received

    model.load_weights = load_and_note
    try:
        runner.reload_weights(weights_iterator=parameters)
    finally:
        del model.load_weights
    reported = {_reported(name) for name in received}
    return {name for name in expected if _reported(name) not in reported}


def _stacking_layers(model: nn.Module) -> dict[str, tuple[str, Any]]:
    """Return name and layer in the engine of each mixture of unquantized experts in the files.

    Gate and up are joined there.
    """
    layers = {}
    for name, layer in model.named_modules():
        plain = isinstance(getattr(layer, "quant_method", None), UnquantizedFusedMoEMethod)
        if plain and hasattr(layer, "w13_weight") and layer.moe_config.is_act_and_mul:
            layers[name.removesuffix(".routed_experts")] = name, layer
    return layers


def _load_stacks(
    layers: dict[str, tuple[str, Any]], weights: Iterable[tuple[str, Tensor]], loaded: set[str]
) -> Iterator[tuple[str, Tensor]]:
    """Load stacked experts, a call of vLLM's own loader for each stack, and yield the other weights.

    Stacks that it cannot take whole, such as those of an engine whose processes hold some experts each, are yielded
    expert by expert.

    Args:
        loaded: receives the names of the parameters that are loaded.
    """
    for name, value in weights:
        mixture, _, projection = name.partition(".*.")
        kind, part = PROJECTIONS.get(projection, ("", ""))
        engine_name, layer = layers.get(mixture, ("", None))
        parameter = getattr(layer, kind, None)
        if parameter is None or len(parameter) != len(value):
            yield from one_by_one(name, value)
        else:
            whole = {"param": parameter, "loaded_weight": value, "weight_name": kind, "shard_id": part, "expert_id": 0}
            parameter.weight_loader(**whole, return_success=True)
            loaded.add(f"{engine_name}.{kind}")
        # Free this weight before the next one is gathered.
        del value


def _reported(name: str) -> str:
    """Return a parameter's name in the form that every version of vLLM reports; some omit the group of experts."""
    return name.replace(".routed_experts.", ".")


def _refresh_tied_head(model: nn.Module) -> None:
    """Prepare an output head that shares the embedding's weights again.

    On CPU vLLM multiplies by a packed copy of a layer's weights, and repacks the layers that a reload names. It never
    names a tied head, which would keep the packed copy of the old weights.
    """
    head: Any = getattr(model, "lm_head", None)
    weight = getattr(head, "weight", None)
    owners = [module for module in model.modules() if getattr(module, "weight", None) is weight]
    if weight is not None and len(owners) > 1:
        head.quant_method.process_weights_after_loading(head)


def _pack_experts(model: nn.Module) -> None:
    """Pack the weights of a mixture's experts again.

    On CPU vLLM multiplies by packed weights here too, but packs them only when the engine starts: a reload would leave
    unpacked ones in their place.
    """
    if not current_platform.is_cpu():
        return
    for layer in model.modules():
        kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
        if kernel is not None:
            kernel.fused_experts.process_weights_after_loading(layer)
