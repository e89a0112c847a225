"""Options in ``additional_config={"hidden_states": {...}}``, checked before an engine starts."""

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

KEY = "hidden_states"
"""Key of the options in vLLM's ``additional_config``."""

PHASES = ("decode", "prefill", "both")
DEVICES = ("cpu", "device")
RANKS = ("all", "first")
DTYPES = ("auto", "float32", "bfloat16", "float16")

Reducer = Callable[[list[Tensor]], Any]
"""Function that maps a list of finished responses' states to a dictionary of columns. States have the shape
``[num_tokens, num_layers, hidden]``, and columns are tensors with one entry per response or per token."""


@dataclass(frozen=True)
class CaptureOptions:
    """Parsed value of ``additional_config["hidden_states"]``."""

    layers: tuple[int, ...] = (-1,)
    """Layers to capture, in the order of the result. Index k, which may be negative, means ``hidden_states[1:][k]`` in
    ``transformers``: the output of decoder layer k or, for the last layer, the state after the final norm."""
    phase: str = "decode"
    """``decode`` for the states from which response tokens were sampled, ``prefill`` for prompt states, or ``both``."""
    dtype: str = "auto"
    """Dtype in which states are stored and returned. ``auto`` is the model's dtype."""
    device: str = "cpu"
    """Device of the results: ``cpu``, or ``device`` for the engine's device if the engine is in this process."""
    max_bytes: int = 1 << 30
    """Maximum size of each worker's device buffer in bytes. A full buffer moves its oldest rows to host memory."""
    ranks: str = "all"
    """Tensor-parallel ranks that return states (``all`` or ``first``) if an external launcher started each rank as a
    separate engine. Without an external launcher, only the first rank returns states."""
    reducer: str | None = None
    """Import path ``module:function`` of a :data:`Reducer` that runs on the device. The result replaces the states."""
    reducer_options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the reducer. The values are JSON values."""
    workspace: str | None = None
    """Import path ``module:function`` of a function that returns the reducer's additional device memory in bytes. It
    receives the maximum response length in tokens, the number of layers, the hidden size, and ``reducer_options`` as
    keyword arguments. The memory is reserved when vLLM sizes the KV cache."""

    @classmethod
    def parse(cls, additional_config: Any) -> "CaptureOptions | None":
        """Parse the options in vLLM's ``additional_config``, or return None if it does not enable hidden states.

        Raises ``ValueError`` with a description of valid values if an option or a value is invalid.
        """
        if not isinstance(additional_config, Mapping) or additional_config.get(KEY) is None:
            return None
        raw = additional_config[KEY]
        if not isinstance(raw, Mapping):
            raise _error("", raw, "must be a mapping such as {'layers': [-1]}")
        known = [option.name for option in fields(cls)]
        unknown = sorted(set(raw) - set(known))
        if unknown:
            raise _error("", dict(raw), f"unknown options {unknown}; known: {known}")
        options = cls(**{**raw, "layers": _layers(raw.get("layers", cls.layers))})
        options._check()
        return options

    def _check(self) -> None:
        for name, choices in (("phase", PHASES), ("device", DEVICES), ("dtype", DTYPES), ("ranks", RANKS)):
            if getattr(self, name) not in choices:
                raise _error(name, getattr(self, name), f"must be one of {list(choices)}")
        if not isinstance(self.max_bytes, int) or isinstance(self.max_bytes, bool) or self.max_bytes <= 0:
            raise _error("max_bytes", self.max_bytes, "must be a positive number of bytes")
        if not isinstance(self.reducer_options, Mapping):
            raise _error("reducer_options", self.reducer_options, "must be a mapping of keyword arguments")
        if self.reducer is None and self.reducer_options:
            raise _error("reducer_options", self.reducer_options, "set reducer too, or leave the options out")
        if self.reducer is not None:
            if self.phase == "prefill":
                raise _error("reducer", self.reducer, "it reduces the states of responses; phase='prefill' keeps none")
            self.load_reducer()
        if self.workspace is not None:
            if self.reducer is None:
                raise _error("workspace", self.workspace, "it is the reducer's; set reducer too, or leave it out")
            _load("workspace", self.workspace, (0, 0, 0), self.reducer_options)

    def workspace_bytes(self, num_tokens: int, num_layers: int, width: int) -> int:
        """Return how many bytes of memory the reducer needs, or 0 if ``workspace`` is not set."""
        if self.workspace is None:
            return 0
        function = _load("workspace", self.workspace, (0, 0, 0), self.reducer_options)
        return int(function(num_tokens, num_layers, width))

    def load_reducer(self) -> Reducer | None:
        """Import the reducer, or return None if there is none.

        Raises ``ValueError`` if the function does not exist or does not accept ``reducer_options``.
        """
        if self.reducer is None:
            return None
        reducer: Reducer = _load("reducer", self.reducer, ([],), self.reducer_options)
        return reducer

    def resolve_layers(self, num_layers: int) -> tuple[int, ...]:
        """Return the captured layers as nonnegative indices. ``num_layers - 1`` is the state after the final norm.

        Raises ``ValueError`` if a layer does not exist in the model or is listed twice.
        """
        for layer in self.layers:
            if not -num_layers <= layer < num_layers:
                raise _error(
                    "layers",
                    list(self.layers),
                    f"the model has {num_layers} layers: from {-num_layers} to {num_layers - 1}",
                )
        resolved = tuple(layer % num_layers for layer in self.layers)
        if len(set(resolved)) != len(resolved):
            raise _error("layers", list(self.layers), f"names one of the model's {num_layers} layers twice")
        return resolved

    def resolve_dtype(self, model_dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which states are stored."""
        dtype: torch.dtype = model_dtype if self.dtype == "auto" else getattr(torch, self.dtype)
        return dtype

    @property
    def keeps_prompts(self) -> bool:
        """Whether the states of prompt tokens are kept."""
        return self.phase in ("prefill", "both")

    @property
    def keeps_responses(self) -> bool:
        """Whether the states from which response tokens were sampled are kept."""
        return self.phase in ("decode", "both")


def _layers(raw: Any) -> tuple[int, ...]:
    if not isinstance(raw, list | tuple) or not raw or not all(type(layer) is int for layer in raw):
        raise _error("layers", raw, "must be a list of whole numbers such as [-1] or [5, 11, -1]")
    return tuple(raw)


def _load(option: str, path: str, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
    """Load ``module:function`` and bind keyword arguments. Raise ``ValueError`` if the function rejects them."""
    try:
        module, _, name = path.partition(":")
        loaded: Any = importlib.import_module(module)
        function = functools.reduce(getattr, name.split("."), loaded)
        signature = inspect.signature(function)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise _error(option, path, f"must be 'module:function' ({error})") from error
    try:
        signature.bind(*arguments, **keywords)
    except TypeError as error:
        raise _error("reducer_options", dict(keywords), f"{path} {error}") from error
    return functools.partial(function, **keywords)


def _error(option: str, value: Any, reason: str) -> ValueError:
    where = f"additional_config['{KEY}']" + (f"['{option}']" if option else "")
    return ValueError(f"{where}={value!r}: {reason}")
