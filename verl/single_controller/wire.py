"""Batches as they travel between processes: every bit of them, in as few bytes as cost no thought.

Tensors become numpy arrays, which Ray reads in place from shared memory. In an array of rows

1. the ends of each row that hold nothing but padding are cut,
2. rows that are each one number repeated, such as masks and the advantages of GRPO, are sent as that number,
3. integers travel in the narrowest type that holds them, token ids as 16 bits and the one or two bits above those,

and a field with the bits of an earlier one of its batch travels as that one's name. The receiver has the tensors as
they were, so that no result depends on any of this.

Legend: R rows, C columns.
"""

from dataclasses import dataclass, fields
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict, is_tensorclass
from torch import Tensor

Array = NDArray[Any]

BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
"""Bytes of a number -> the type that compares its bits, in which NaN is NaN and -0.0 is not 0.0."""

NARROW = (np.uint8, np.uint16)
"""What int64 travels as, where it fits; above them 16 bits and single ones, then int32."""

LARGEST_ID = 1 << 24
"""Integers from here on are not cut into 16 bits and the rest."""


class Span(NamedTuple):
    """What of each row is not padding."""

    starts: Array
    """[R] the first column."""
    stops: Array
    """[R] the column after the last."""
    fill: Array
    """[1] what all other columns hold."""


@dataclass(frozen=True)
class PackedTensor:
    """A tensor in transit."""

    shape: tuple[int, ...]
    dtype: str
    """numpy's name of the tensor's type; ``values`` may have a narrower one."""
    values: Array
    """[n], row by row; with ``constant`` [R]."""
    span: Span | None
    """None: the whole of every row is sent."""
    constant: bool
    """Each row is one number repeated."""
    high: Array | None = None
    """[k, n / 8] uint8, of integers in k more bits than ``values`` has: those bits, eight numbers to a byte."""

    def same_as(self, other: "PackedTensor") -> bool:
        """Whether both hold the same bits; equal tensors are cut in the same way."""
        if (self.shape, self.dtype, self.constant) != (other.shape, other.dtype, other.constant):
            return False
        pairs = list(zip_longest(self.arrays, other.arrays))
        return all(a is not None and b is not None and a.dtype == b.dtype for a, b in pairs) and all(
            np.array_equal(_bits(a), _bits(b)) for a, b in pairs
        )

    @property
    def arrays(self) -> list[Array]:
        """All that travels."""
        return [self.values, *(self.span or ()), *([] if self.high is None else [self.high])]


@dataclass(frozen=True)
class PackedBatch:
    """A tensorclass, or a TensorDict, in transit."""

    kind: type | None
    """None for a TensorDict."""
    size: list[int]
    fields: dict[str, Any]
    same: dict[str, str]
    """Fields with the bits of another -> its name."""


def pack(value: Any) -> Any:
    """``value`` with its batches and tensors in the form in which they travel; anything else as it is."""
    if isinstance(value, Tensor):
        return _pack_tensor(value)
    if isinstance(value, tuple) and type(value) is tuple:
        return tuple(map(pack, value))
    is_class = is_tensorclass(value)
    if not is_class and not isinstance(value, TensorDict):
        return value
    names = [field.name for field in fields(value)] if is_class else [str(name) for name in value.keys()]
    packed: dict[str, Any] = {}
    same: dict[str, str] = {}
    for name in names:
        entry = pack(getattr(value, name, None) if is_class else value[name])
        twin = _twin(entry, packed)
        if twin is None:
            packed[name] = entry
        else:
            same[name] = twin
    return PackedBatch(type(value) if is_class else None, list(value.batch_size), packed, same)


def unpack(value: Any) -> Any:
    """What :func:`pack` was given."""
    if isinstance(value, PackedTensor):
        return _unpack_tensor(value)
    if isinstance(value, tuple) and type(value) is tuple:
        return tuple(map(unpack, value))
    if not isinstance(value, PackedBatch):
        return value
    found = {name: unpack(entry) for name, entry in value.fields.items()}
    found |= {name: found[twin].clone() for name, twin in value.same.items()}
    if value.kind is None:
        return TensorDict(found, batch_size=value.size)
    return value.kind(**found, batch_size=value.size)


def num_bytes(packed: Any) -> int:
    """Bytes of the numbers in what :func:`pack` returned."""
    if isinstance(packed, PackedTensor):
        return sum(array.nbytes for array in packed.arrays)
    if isinstance(packed, PackedBatch):
        return sum(map(num_bytes, packed.fields.values()))
    return sum(map(num_bytes, packed)) if isinstance(packed, tuple) else 0


def _twin(entry: Any, packed: dict[str, Any]) -> str | None:
    """The name of the tensor in ``packed`` with the bits of ``entry``."""
    if not isinstance(entry, PackedTensor):
        return None
    others = ((name, other) for name, other in packed.items() if isinstance(other, PackedTensor))
    return next((name for name, other in others if entry.same_as(other)), None)


def _pack_tensor(tensor: Tensor) -> Any:
    if tensor.dtype == torch.bfloat16:  # numpy has none
        return tensor
    array = tensor.detach().cpu().numpy()
    shape = tuple(array.shape)
    if array.ndim < 2 or array.size == 0 or shape[-1] == 1:
        return _packed(shape, np.ascontiguousarray(array).reshape(-1), None, False)
    rows = np.ascontiguousarray(array).reshape(-1, shape[-1])
    span = _span(rows)
    inside = _inside(span, rows.shape[1])
    values = rows[inside]
    # 2. One number a row. A row of padding alone has none, and any will do.
    first = rows[np.arange(len(rows)), np.minimum(span.starts, rows.shape[1] - 1)]
    constant = np.array_equal(_bits(values), _bits(np.repeat(first, span.stops - span.starts)))
    if constant:
        values = first
    elif values.size == rows.size:
        return _packed(shape, values, None, False)
    return _packed(shape, values, span, constant)


def _packed(shape: tuple[int, ...], values: Array, span: Span | None, constant: bool) -> PackedTensor:
    """3. Integers in the narrowest type."""
    dtype = values.dtype.name
    low, high = (int(values.min()), int(values.max())) if dtype == "int64" and values.size else (-1, LARGEST_ID << 9)
    fitting = [kind for kind in NARROW if low >= 0 and high <= np.iinfo(kind).max]
    if fitting:
        return PackedTensor(shape, dtype, values.astype(fitting[0]), span, constant)
    if low >= 0 and high < LARGEST_ID:
        above, counts = (values >> 16).astype(np.uint8), np.arange(high.bit_length() - 16, dtype=np.uint8)
        bits = np.packbits(above >> counts[:, None] & 1, axis=1)
        return PackedTensor(shape, dtype, (values & 0xFFFF).astype(np.uint16), span, constant, bits)
    if -(1 << 31) <= low and high < 1 << 31:
        values = values.astype(np.int32)
    return PackedTensor(shape, dtype, values, span, constant)


def _values(packed: PackedTensor) -> Array:
    """The numbers in their own type."""
    values = packed.values.astype(packed.dtype)
    for place, bits in enumerate(packed.high if packed.high is not None else ()):
        values |= np.unpackbits(bits, count=len(values)).astype(packed.dtype) << (16 + place)
    return values


def _unpack_tensor(packed: PackedTensor) -> Tensor:
    values = _values(packed)
    if packed.span is None:
        return torch.from_numpy(values.reshape(packed.shape))
    columns = packed.shape[-1]
    rows = np.full((len(packed.span.starts), columns), packed.span.fill[0], dtype=packed.dtype)
    lengths = packed.span.stops - packed.span.starts
    rows[_inside(packed.span, columns)] = np.repeat(values, lengths) if packed.constant else values
    return torch.from_numpy(rows.reshape(packed.shape))


def _span(rows: Array) -> Span:
    """Of [R, C]; padding is what most rows begin or end with."""
    bits = _bits(rows)
    ends, counts = np.unique(np.concatenate([bits[:, 0], bits[:, -1]]), return_counts=True)
    fill = ends[counts.argmax()]
    used = bits != fill
    filled = used.any(axis=1)
    starts = np.where(filled, used.argmax(axis=1), 0)
    stops = np.where(filled, bits.shape[1] - used[:, ::-1].argmax(axis=1), 0)
    return Span(starts.astype(np.int32), stops.astype(np.int32), fill[None].view(rows.dtype))


def _inside(span: Span, num_columns: int) -> Array:
    """[R, C] bool."""
    columns = np.arange(num_columns, dtype=np.int32)
    inside: Array = (columns >= span.starts[:, None]) & (columns < span.stops[:, None])
    return inside


def _bits(array: Array) -> Array:
    return array.view(BITS[array.itemsize])
