"""State as JSON: a checkpoint's parts other than weights are readable by people and never unpickled."""

import base64
import zlib
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.config.errors import ConfigError
from verl.utils.user_code import user_code

_TENSOR = "__tensor__"
_MAPPING = "__mapping__"
"""The only key of a mapping that stands for a tensor, or for a mapping whose only key is one of these."""


def to_json(value: Any) -> Any:
    """``value`` with tensors and arrays as mappings of dtype, shape and zlib's bytes in base64, and tuples as lists.

    Raises:
        TypeError: a value is not a tensor, array, mapping, list, tuple, text, number or None, or a key is not text.
    """
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(value)
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, Tensor):
        array = value.detach().cpu().contiguous().numpy()
        # Most are small whole numbers: ids of tokens, places, versions.
        data = base64.b64encode(zlib.compress(array.tobytes(), level=1)).decode()
        return {_TENSOR: {"dtype": array.dtype.name, "shape": list(array.shape), "zlib": data}}
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"{key!r}: a key of a mapping in JSON is text, not {type(key).__name__}")
        entries = {key: to_json(entry) for key, entry in value.items()}
        return {_MAPPING: entries} if len(entries) == 1 and entries.keys() & {_TENSOR, _MAPPING} else entries
    if isinstance(value, list | tuple):
        return [to_json(entry) for entry in value]
    if value is None or isinstance(value, str | bool | int | float):
        return value
    raise TypeError(f"{value!r}: {type(value).__name__} cannot be saved as JSON")


def from_json(value: Any) -> Any:
    """Invert :func:`to_json`, with arrays as tensors and tuples as lists."""
    if isinstance(value, dict):
        if set(value) == {_TENSOR}:
            stored = value[_TENSOR]
            dtype, shape = np.dtype(stored["dtype"]), stored["shape"]
            if "zlib" in stored:
                # No more than the shape needs, whatever the bytes would unpack to.
                packed, size = base64.b64decode(stored["zlib"]), dtype.itemsize * prod(shape)
                data = zlib.decompressobj().decompress(packed, size + 1)
            else:  # a checkpoint of an earlier version
                data = base64.b64decode(stored["data"])
            return torch.from_numpy(np.frombuffer(data, dtype).reshape(shape).copy())
        if set(value) == {_MAPPING}:
            value = value[_MAPPING]
        return {key: from_json(entry) for key, entry in value.items()}
    return [from_json(entry) for entry in value] if isinstance(value, list) else value


class UserState:
    """The state of an object of the user's with ``state_dict`` and ``load_state_dict``, or of one without.

    The state holds what JSON holds, and tensors.

    Raises:
        ConfigError: the object has only one of these methods, or its state cannot be saved.
    """

    def __init__(self, where: str, owner: Any, has: tuple[bool, bool]) -> None:
        """Wrap an object of the user's code.

        Args:
            where: the option that named it, and its value.
            has: whether it has each of the two methods.
        """
        self.where, self.owner = where, owner
        if any(has) != all(has):
            raise ConfigError(f"{where}: define both state_dict and load_state_dict, or neither")
        self.exists = all(has)
        self.save()  # a state that cannot be saved is reported before training

    def save(self) -> Any:
        """Return the state as JSON; None without one."""
        if not self.exists:
            return None
        with user_code(f"{self.where}: its state_dict(), which may hold what JSON holds and tensors,"):
            return to_json(self.owner.state_dict())

    def load(self, state: Any) -> None:
        """Restore what :meth:`save` returned. Raises ``ConfigError`` for the state of other code."""
        if (state is not None) != self.exists:
            raise ConfigError(f"{self.where}: the checkpoint was written with other code; start a new run")
        if self.exists:
            with user_code(f"{self.where}: its load_state_dict(state)"):
                self.owner.load_state_dict(from_json(state))
