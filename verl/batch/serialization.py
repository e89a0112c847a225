"""Serialization of columns and weights for transfer between processes."""

import warnings
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor


class Packed(NamedTuple):
    """Losslessly compressed column.

    - Token columns that are constant within each episode, such as GRPO's advantages, store one value per episode.
    - Booleans are packed into bits.
    - Non-negative integers below 2^24, such as token ids, are split into the low 16 bits and bit-packed high bits.
    """

    values: Any
    """Numpy array, or the column itself if numpy cannot represent it."""
    dtype: str = ""
    """Numpy name of the column's dtype, or an empty string if ``values`` is the column itself."""
    constant: bool = False
    """Whether ``values`` has one entry per episode."""
    high: Any = None
    """[k, n / 8] uint8, the k bits above the low 16 bits of n integers, one row per bit."""

    @classmethod
    def of(cls, column: Any, lengths: Any) -> "Packed":
        """Compress a column with ``lengths [B]`` entries per episode, or one per episode if ``lengths`` is None."""
        if not isinstance(column, Tensor) or column.dtype == torch.bfloat16:  # numpy has no bfloat16
            return cls(column)
        values = column.detach().cpu().contiguous().numpy()
        dtype, constant = values.dtype.name, False
        if lengths is not None and values.ndim == 1 and (lengths > 0).all():
            # Compare bits, so that NaN equals itself and -0.0 differs from 0.0.
            bits = values.view(f"u{values.itemsize}")
            starts = lengths.cumsum() - lengths
            constant = bool(np.array_equal(bits, bits[starts].repeat(lengths)))
            values = values[starts] if constant else values
        if dtype == "bool" and values.ndim == 1:
            return cls((np.packbits(values), len(values)), dtype, constant)
        if dtype == "int64" and values.size and 0 <= values.min() and values.max() < 1 << 24:
            above = (values >> 16).astype(np.uint8)
            bits = np.arange(int(values.max()).bit_length() - 16, dtype=np.uint8)
            high = np.packbits(above.ravel() >> bits[:, None] & 1, axis=1)
            return cls(values.astype(np.uint16), dtype, constant, high if above.any() else None)
        return cls(values, dtype, constant)

    def restore(self, lengths: Any) -> Any:
        """Decompress the column. ``lengths`` must be the same as in :meth:`of`."""
        if not self.dtype:
            return self.values
        if self.dtype == "bool" and isinstance(self.values, tuple):
            packed, count = self.values
            values = np.unpackbits(packed, count=count).astype(bool)
        else:
            # Copy the array, because Ray's arrays are read-only views of shared memory.
            values = np.array(self.values, dtype=self.dtype)
        for place, bits in enumerate(() if self.high is None else self.high):
            values |= np.unpackbits(bits, count=values.size).reshape(values.shape).astype(np.int64) << (16 + place)
        return torch.from_numpy(values.repeat(lengths) if self.constant else values)

    @property
    def num_bytes(self) -> int:
        """Total size of the arrays in bytes."""
        arrays = [self.values[0] if isinstance(self.values, tuple) else self.values, self.high]
        return sum(array.nbytes for array in arrays if isinstance(array, np.ndarray))


class PackedWeight(NamedTuple):
    """Serialized weight that the receiver can use without copying it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    values: Any
    """Raw bytes, [n] uint8, because numpy has no bfloat16."""
    version: int
    """Version of the weights, as numbered by the trainer."""
    digest: int
    """:func:`digest` of the weight on the sender's device."""

    @classmethod
    def of(cls, name: str, value: Tensor, version: int) -> "PackedWeight":
        """Serialize a weight, copying it to the CPU."""
        value = value.detach().contiguous()
        flat = value.cpu().reshape(-1)
        return cls(name, value.dtype, tuple(value.shape), flat.view(torch.uint8).numpy(), version, digest(value))

    def restore(self) -> Tensor:
        """Return the weight, which must be treated as read-only because its memory may be shared.

        Raises ``RuntimeError`` if the received bytes differ from the bytes that were sent.
        """
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")
            value = torch.from_numpy(self.values).view(self.dtype).reshape(self.shape)
        if digest(value) != self.digest:
            raise RuntimeError(f"{self.name} {list(self.shape)} of version {self.version} was damaged on its way")
        return value


def digest(value: Tensor) -> int:
    """Return a device-independent checksum of a contiguous tensor's bytes.

    The 4-byte words in each 16 KB block are summed in one pass. The block sums are added with odd weights, modulo 2^64.
    """
    flat = value.reshape(-1).view(torch.uint8)
    flat = flat.clone() if flat.storage_offset() % 4 else flat
    words = flat[: len(flat) // 4 * 4].view(torch.int32)
    width = 1 << 12
    rows = len(words) // width
    sums = words[: rows * width].view(rows, width).sum(dim=1, dtype=torch.int64)
    sums = torch.cat([sums, words[rows * width :].long(), flat[len(words) * 4 :].long()])
    return int((sums * (2 * torch.arange(len(sums), device=sums.device) + 1)).sum())


def weight_buckets(weights: Iterable[tuple[str, Tensor]], num_bytes: int, version: int) -> Iterator[list[PackedWeight]]:
    """Yield weights in buckets of at most ``num_bytes``. A larger weight is put into a separate bucket."""
    bucket: list[PackedWeight] = []
    size = 0
    for name, value in weights:
        packed = PackedWeight.of(name, value, version)
        del value  # free this weight before the next one is gathered
        if bucket and size + packed.values.nbytes > num_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append(packed)
        size += packed.values.nbytes
    if bucket:
        yield bucket
