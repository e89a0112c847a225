"""State as JSON: the parts of a checkpoint besides its weights are readable by people and never unpickled."""

import base64
from typing import Any

import numpy as np
import torch
from torch import Tensor

_TENSOR = "__tensor__"


def to_json(value: Any) -> Any:
    """``value`` with tensors and arrays as mappings of dtype, shape and base64 bytes, and tuples as lists.

    Raises:
        TypeError: a value is not a tensor, array, mapping, list, tuple, text, number or None, or a key is not text.
    """
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(value)
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, Tensor):
        array = value.detach().cpu().contiguous().numpy()
        data = base64.b64encode(array.tobytes()).decode()
        return {_TENSOR: {"dtype": array.dtype.name, "shape": list(array.shape), "data": data}}
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"{key!r}: a key of a mapping in JSON is text, not {type(key).__name__}")
        return {key: to_json(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(entry) for entry in value]
    if value is None or isinstance(value, str | bool | int | float):
        return value
    raise TypeError(f"{value!r}: {type(value).__name__} cannot be saved as JSON")


def from_json(value: Any) -> Any:
    """The inverse of :func:`to_json`, with arrays as tensors and tuples as lists."""
    if isinstance(value, dict):
        if set(value) == {_TENSOR}:
            stored = value[_TENSOR]
            array = np.frombuffer(base64.b64decode(stored["data"]), dtype=np.dtype(stored["dtype"]))
            return torch.from_numpy(array.reshape(stored["shape"]).copy())
        return {key: from_json(entry) for key, entry in value.items()}
    return [from_json(entry) for entry in value] if isinstance(value, list) else value
