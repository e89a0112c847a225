"""Weights into a running vLLM engine: the precision they travel in, and their reload one parameter at a time."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from vllm import LLM
from vllm.config import set_current_vllm_config
from vllm.platforms import current_platform

from verl.models.fsdp import EngineDtype, name_tail


def engine_dtype(engine: LLM) -> EngineDtype:
    """How weights travel to this engine."""
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

    def load_and_note(weights: Iterable[tuple[str, Tensor]]) -> set[str] | None:
        nonlocal received
        loaded: set[str] | None = load_weights(weights)
        received = expected if loaded is None else set(loaded)
        return loaded

    model.load_weights = load_and_note
    try:
        runner.reload_weights(weights_iterator=parameters)
    finally:
        del model.load_weights
    given = {_reported(name) for name in received}
    return {name for name in expected if _reported(name) not in given}


def _reported(name: str) -> str:
    """A parameter's name in the form that every version of vLLM reports; some leave out the group of experts."""
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
