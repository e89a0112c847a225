"""Hidden states of a model of ``transformers`` at the position that it predicts from."""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


class LastStates:
    """Within its ``with`` block, the states that each forward pass leaves at its last position.

    Layers are numbered as ``vllm_patches`` numbers them: ``k`` is the output of decoder layer k, counted from the end
    where negative, and the last one stands for the state after the final norm.
    """

    def __init__(self, model: PreTrainedModel, layers: Sequence[int]) -> None:
        """
        Raises:
            ValueError: the model has no such layer, one is named twice, or its layers cannot be found.
        """
        decoder = model.get_decoder()
        num_layers = model.config.get_text_config().num_hidden_layers
        resolved = [layer % num_layers for layer in layers if -num_layers <= layer < num_layers]
        if len(set(resolved)) != len(layers):
            raise ValueError(
                f"calculator.layers={list(layers)}: each must be one of the model's layers, from {-num_layers} to "
                f"{num_layers - 1}, and named once"
            )
        blocks: Sequence[nn.Module] = ()
        if any(layer != num_layers - 1 for layer in resolved):
            blocks = _blocks(decoder, num_layers, layers)
        self._sources = [decoder if layer == num_layers - 1 else blocks[layer] for layer in resolved]
        self._seen: dict[nn.Module, Tensor] = {}
        self._hooks = ExitStack()

    def __enter__(self) -> "LastStates":
        for module in self._sources:
            handle = module.register_forward_hook(self._keep)
            self._hooks.callback(handle.remove)
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.close()
        self._seen.clear()

    def read(self) -> Tensor:
        """Of the last forward pass, [B, L, D] in the order of the layers asked for."""
        return torch.stack([self._seen[module] for module in self._sources], dim=1)

    def _keep(self, module: nn.Module, _: Any, output: Any) -> None:
        states: Tensor = output if isinstance(output, Tensor) else output[0]
        self._seen[module] = states[:, -1]


def _blocks(decoder: nn.Module, num_layers: int, layers: Sequence[int]) -> nn.ModuleList:
    """The decoder's layers: its list of that many modules."""
    for child in decoder.children():
        if isinstance(child, nn.ModuleList) and len(child) == num_layers:
            return child
    raise ValueError(
        f"calculator.layers={list(layers)}: {type(decoder).__name__} keeps its layers in no list of {num_layers}; set "
        "[-1], the state after the final norm"
    )
