"""Reloads a running vLLM engine's weights, one parameter at a time, in the precision that the engine accepts."""

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
"""Maps an expert's weight name in checkpoints to vLLM's fused parameter and the shard of it that is loaded."""


def engine_dtype(engine: LLM) -> EngineDtype:
    """Return the precision in which weights are sent to this engine."""
    runner = _runner(engine)
    dtype: torch.dtype = runner.vllm_config.model_config.dtype
    parameters = runner.get_model().named_parameters()
    wider = [name for name, p in parameters if p.is_floating_point() and p.dtype.itemsize > dtype.itemsize]
    return EngineDtype(dtype, frozenset(map(name_tail, wider)))


def _runner(engine: LLM) -> Any:
    return engine.llm_engine.model_executor.driver_worker.worker.model_runner


def reload_weights(engine: LLM, parameters: Iterable[tuple[str, Tensor]]) -> None:
    """Replace the engine's weights and discard everything cached under the old ones.

    With tensor parallelism, every process of the engine receives full parameters, which vLLM slices. Raises
    ``RuntimeError`` with the names of any engine parameters that are missing from ``parameters``.

    Args:
        parameters: Output of :func:`verl.models.huggingface.checkpoint_parameters`, with stacked experts.
    """
    runner = _runner(engine)
    model = runner.get_model()
    # Some layers and attention backends read the config while preparing new weights, as they do at startup.
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
    """Reload the weights and return the names of the parameters that were not loaded.

    vLLM only logs missing parameters. The names are inferred from those that ``load_weights`` returns. If it returns
    None, the check is skipped.
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
    """Return each unquantized mixture-of-experts layer and its name in the engine, keyed by its checkpoint name.

    Only layers that fuse the gate and up projections are included.
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
    """Load each stack of experts with a single call to vLLM's loader, and yield all other weights.

    If a stack cannot be loaded as a whole, for example because each engine process has only some of the experts, its
    experts are yielded one by one.

    Args:
        loaded: Set to which the names of loaded parameters are added.
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
    """Normalize a parameter's name across vLLM versions, some of which omit the expert group."""
    return name.replace(".routed_experts.", ".")


def _refresh_tied_head(model: nn.Module) -> None:
    """Repack an output head that shares the embedding's weights.

    On a CPU, vLLM computes with a packed copy of each layer's weights and repacks only the layers that it reloads. A
    tied head is not reloaded, so its packed copy of the old weights would remain in use.
    """
    head: Any = getattr(model, "lm_head", None)
    weight = getattr(head, "weight", None)
    owners = [module for module in model.modules() if getattr(module, "weight", None) is weight]
    if weight is not None and len(owners) > 1:
        head.quant_method.process_weights_after_loading(head)


def _pack_experts(model: nn.Module) -> None:
    """Repack the weights of mixture-of-experts layers.

    On a CPU, vLLM packs these weights only when the engine starts, so a reload would replace them with unpacked
    weights.
    """
    if not current_platform.is_cpu():
        return
    for layer in model.modules():
        kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
        if kernel is not None:
            kernel.fused_experts.process_weights_after_loading(layer)
