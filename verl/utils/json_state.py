"""Serialises state as JSON, so that everything in a checkpoint except the weights is readable without unpickling."""

import base64
import hashlib
import json
import sys
import zlib
from collections.abc import Iterable
from math import prod
from typing import Any

import numpy as np

from verl.config.errors import ConfigError
from verl.utils.user_code import user_code

_TENSOR = "__tensor__"
_MAPPING = "__mapping__"
"""Keys that mark encoded tensors, and single-key mappings that would otherwise look like encoded values."""


def digest(values: Iterable[Any]) -> str:
    """Return an order-dependent digest of JSON values. Values of other types are converted with ``str``."""
    total = hashlib.blake2b(digest_size=16)
    for value in values:
        total.update(json.dumps(value, sort_keys=True, default=str).encode(errors="surrogatepass"))
        total.update(b"\n")
    return total.hexdigest()


def to_json(value: Any) -> Any:
    """Convert tuples in ``value`` to lists, and tensors and arrays to mappings of dtype, shape and base64 zlib data.

    Raises ``TypeError`` if a key is not a string or if a value has an unsupported type, such as bytes or a set.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, np.ndarray):
        value = _torch().from_numpy(value)
    # There are no tensors before torch is imported.
    if "torch" in sys.modules and isinstance(value, _torch().Tensor):
        array = value.detach().cpu().contiguous().numpy()
        # Compress the data, because most tensors contain small integers: token ids, positions, versions.
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
    """Invert :func:`to_json`, except that arrays become tensors and tuples become lists."""
    if isinstance(value, dict):
        if set(value) == {_TENSOR}:
            stored = value[_TENSOR]
            dtype, shape = np.dtype(stored["dtype"]), stored["shape"]
            if "zlib" in stored:
                # Decompress at most as many bytes as the shape needs, regardless of the data.
                packed, size = base64.b64decode(stored["zlib"]), dtype.itemsize * prod(shape)
                data = zlib.decompressobj().decompress(packed, size + 1)
            else:  # written by an earlier version
                data = base64.b64decode(stored["data"])
            return _torch().from_numpy(np.frombuffer(data, dtype).reshape(shape).copy())
        if set(value) == {_MAPPING}:
            value = value[_MAPPING]
        return {key: from_json(entry) for key, entry in value.items()}
    return [from_json(entry) for entry in value] if isinstance(value, list) else value


def _torch() -> Any:
    """Import torch lazily: the import takes seconds, and most environment processes do not need torch."""
    import torch

    return torch


class UserState:
    """State of an object from user code. Only objects with ``state_dict`` and ``load_state_dict`` have a state.

    The state may contain JSON values and tensors.

    Raises ``ConfigError`` if the object has only one of the two methods, or if its state cannot be saved.
    """

    def __init__(self, where: str, owner: Any, has: tuple[bool, bool]) -> None:
        """Wrap an object from user code.

        Args:
            where: Option that names the object, with its value.
            has: Whether the object has ``state_dict``, and whether it has ``load_state_dict``.
        """
        self.where, self.owner = where, owner
        if any(has) != all(has):
            raise ConfigError(f"{where}: define both state_dict and load_state_dict, or neither")
        self.exists = all(has)
        self.save()  # if the state cannot be saved, report this before training starts

    def save(self) -> Any:
        """Return the state as JSON, or None if the object has no state."""
        if not self.exists:
            return None
        with user_code(f"{self.where}: its state_dict(), which may hold what JSON holds and tensors,"):
            return to_json(self.owner.state_dict())

    def load(self, state: Any) -> None:
        """Restore a state returned by :meth:`save`, or raise ``ConfigError`` if the state is from different code."""
        if (state is not None) != self.exists:
            raise ConfigError(f"{self.where}: the checkpoint was written with other code; start a new run")
        if self.exists:
            with user_code(f"{self.where}: its load_state_dict(state)"):
                self.owner.load_state_dict(from_json(state))
