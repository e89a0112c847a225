"""Columns and weights as they travel between processes."""

import warnings
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor


class Packed(NamedTuple):
    """A column in transit: every bit of it, in as few bytes as cost no thought.

    A column of tokens that is one number throughout each episode, such as the advantages of GRPO, travels as that
    number. Bools travel as bits; token ids as 16 bits and the one or two bits above those.
    """

    values: Any
    """A numpy array; or what the column is, where it is not a tensor that numpy knows."""
    dtype: str = ""
    """numpy's name of the column's type; empty: ``values`` is the column."""
    constant: bool = False
    """``values`` has one entry for each episode."""
    high: Any = None
    """[k, n / 8] uint8, of integers with k bits above their low 16: those bits, eight numbers to a byte."""

    @classmethod
    def of(cls, column: Any, lengths: Any) -> "Packed":
        """``lengths``: [B], the entries of each episode; None where each has one."""
        if not isinstance(column, Tensor) or column.dtype == torch.bfloat16:  # numpy has none
            return cls(column)
        values = column.detach().cpu().contiguous().numpy()
        dtype, constant = values.dtype.name, False
        if lengths is not None and values.ndim == 1 and (lengths > 0).all():
            # Bits are compared: NaN equals itself, and -0.0 is not 0.0.
            bits = values.view(f"u{values.itemsize}")
            starts = lengths.cumsum() - lengths
            constant = bool(np.array_equal(bits, bits[starts].repeat(lengths)))
            values = values[starts] if constant else values
        if dtype == "bool" and values.ndim == 1:
            return cls((np.packbits(values), len(values)), dtype, constant)
        if dtype == "int64" and values.size and 0 <= values.min() and values.max() < 1 << 24:
            above = (values >> 16).astype(np.uint8)
            bits = np.arange(int(values.max()).bit_length() - 16, dtype=np.uint8)
            high = np.packbits(above >> bits[:, None] & 1, axis=1) if values.ndim == 1 else above
            return cls(values.astype(np.uint16), dtype, constant, high if above.any() else None)
        return cls(values, dtype, constant)

    def restore(self, lengths: Any) -> Any:
        """Return the column; ``lengths`` as :meth:`of` takes them."""
        if not self.dtype:
            return self.values
        if self.dtype == "bool" and isinstance(self.values, tuple):
            packed, count = self.values
            values = np.unpackbits(packed, count=count).astype(bool)
        else:
            # Ray's arrays are read-only views of shared memory: a tensor needs its own.
            values = np.array(self.values, dtype=self.dtype)
        if self.high is not None and values.ndim > 1:
            values |= self.high.astype(np.int64) << 16
        elif self.high is not None:
            for place, bits in enumerate(self.high):
                values |= np.unpackbits(bits, count=len(values)).astype(np.int64) << (16 + place)
        return torch.from_numpy(values.repeat(lengths) if self.constant else values)

    @property
    def num_bytes(self) -> int:
        """Bytes of the arrays."""
        arrays = [self.values[0] if isinstance(self.values, tuple) else self.values, self.high]
        return sum(array.nbytes for array in arrays if isinstance(array, np.ndarray))


class PackedWeight(NamedTuple):
    """A weight in transit, which a reader need not copy."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    values: Any
    """Its bytes, [n] uint8: numpy has no bfloat16."""

    @classmethod
    def of(cls, name: str, value: Tensor) -> "PackedWeight":
        """Copy ``value`` to the CPU."""
        flat = value.detach().cpu().contiguous().reshape(-1)
        return cls(name, value.dtype, tuple(value.shape), flat.view(torch.uint8).numpy())

    def restore(self) -> Tensor:
        """Return the weight, which must not be written into: its memory may be shared."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")
            return torch.from_numpy(self.values).view(self.dtype).reshape(self.shape)


def weight_buckets(weights: Iterable[tuple[str, Tensor]], num_bytes: int) -> Iterator[list[PackedWeight]]:
    """Weights in messages of at most ``num_bytes``; a larger one has a message of its own."""
    bucket: list[PackedWeight] = []
    size = 0
    for name, value in weights:
        packed = PackedWeight.of(name, value)
        # Free this weight before the next one is gathered.
        del value
        if bucket and size + packed.values.nbytes > num_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append(packed)
        size += packed.values.nbytes
    if bucket:
        yield bucket
