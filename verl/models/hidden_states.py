"""Hidden states of chosen layers, seen while a model reads.

Legend: B rows, S columns, D hidden width.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from verl.config.errors import ConfigError
from verl.models.output_head import causal_model, decoder_name


@contextmanager
def record_states(model: nn.Module, layers: Sequence[int]) -> Iterator[list[Tensor]]:
    """Within, a forward pass of a causal language model fills the list with the states of ``layers``, [B, S, D] each.

    Args:
        layers: counted from either end, each once. The last is the state after the final norm, any other the output of
            that decoder layer: what ``transformers`` calls ``hidden_states[1:][layer]``.

    Raises:
        ValueError: the model has no such layer, or one is named twice.
    """
    if not layers:
        yield []
        return
    decoder = getattr(causal_model(model), decoder_name(causal_model(model)))
    # A model that also sees images has a text model within.
    decoder = getattr(decoder, "language_model", decoder)
    depth = decoder.config.get_text_config().num_hidden_layers
    wanted = resolve_layers(layers, depth)
    last = depth - 1
    blocks = _blocks(decoder, depth) if any(layer != last for layer in wanted) else []
    found: dict[int, Tensor] = {}
    states: list[Tensor] = []
    with ExitStack() as stack:
        for layer in wanted:
            module = decoder if layer == last else blocks[layer]
            hook = module.register_forward_hook(_keeper(found, layer))
            stack.callback(hook.remove)
        yield states
    states += [found[layer] for layer in wanted]


def _blocks(decoder: nn.Module, depth: int) -> list[nn.Module]:
    """The layers of the part of a language model that holds all but the head."""
    for module in decoder.modules():
        if isinstance(module, nn.ModuleList) and len(module) == depth:
            return list(module)
    raise ValueError(
        f"calculator.layers: {type(decoder).__name__} has no list of its {depth} layers; set [-1], the state after "
        "the final norm, or measure in the engine with calculator.source=rollout and rollout.name=vllm"
    )


def _keeper(found: dict[int, Tensor], layer: int) -> Callable[..., None]:
    def keep(_module: nn.Module, _inputs: Any, output: Any) -> None:
        found[layer] = (output if isinstance(output, Tensor) else output[0]).detach()

    return keep


def resolve_layers(layers: Sequence[int], depth: int) -> list[int]:
    """``layers`` of a model that has ``depth``, counted from the first.

    Raises:
        ConfigError: the model has no such layer, or one is named twice.
    """
    for layer in layers:
        if not -depth <= layer < depth:
            raise ConfigError(
                f"calculator.layers={list(layers)!r}: the model has {depth} layers, from {-depth} to {depth - 1}"
            )
    resolved = [layer % depth for layer in layers]
    if len(set(resolved)) < len(resolved):
        raise ConfigError(f"calculator.layers={list(layers)!r}: names a layer of the model's {depth} twice")
    return resolved
