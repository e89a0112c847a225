"""Rows of hidden states, kept in the order in which an engine computed them and found again by owner and position.

A step appends its rows in one contiguous copy per layer: cheap on a device, where anything cleverer (a fresh clone per
step, a scatter to per-request places) costs a third of the decoding speed. Which row is whose is remembered on the
host. Rows live in segments of fixed size; a segment goes when its last row was released.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

SEGMENT_BYTES = 32 << 20
"""Most bytes of one segment: small enough to be returned soon, large enough to be rarely asked for."""

NOBODY = -1
"""Owner of a row that nobody will ask for."""


class RowBuffer:
    """Rows ``[num_layers, width]`` with their owners and positions.

    On the device it takes ``SEGMENT_BYTES`` (or ``max_bytes / 4``, if that is less) for every ``rows_per_segment``
    rows, at most ``max_bytes``; beyond that the oldest rows move to host memory. Nothing is held while it is empty.
    """

    def __init__(
        self, num_layers: int, width: int, dtype: torch.dtype, device: torch.device | str, max_bytes: int
    ) -> None:
        row_bytes = num_layers * width * dtype.itemsize
        if row_bytes > max_bytes:
            raise ValueError(f"max_bytes={max_bytes}: one row of {num_layers} x {width} {dtype} takes {row_bytes}")
        self.rows_per_segment = max(1, min(SEGMENT_BYTES, max_bytes // 4) // row_bytes)
        self.max_segments = max_bytes // (self.rows_per_segment * row_bytes)
        self.device = torch.device(device)
        self._row_shape = (num_layers, width)
        self._dtype = dtype
        self._segments: list[_Segment] = []
        self.peak_device_bytes = 0
        self.peak_host_bytes = 0

    def append(self, layers: Sequence[Tensor], owners: np.ndarray, positions: np.ndarray) -> None:
        """Add rows; a later row of the same owner and position takes the place of an earlier one.

        Args:
            layers: for each layer ``[num_rows, width]``.
            owners: int64 ``[num_rows]``, ``NOBODY`` for rows that are not needed.
            positions: int64 ``[num_rows]``.
        """
        start = 0
        while start < len(owners):
            segment = self._open_segment()
            stop = min(len(owners), start + segment.room)
            segment.write([layer[start:stop] for layer in layers], owners[start:stop], positions[start:stop])
            start = stop

    def gather(self, owner: int, first: int, count: int) -> tuple[Tensor, np.ndarray]:
        """Rows of one owner at positions ``first`` to ``first + count - 1``.

        Returns:
            The rows ``[count, num_layers, width]`` on the device, NaN where there is none, and bool ``[count]``:
            which there are.
        """
        segment_of = np.full(count, -1)
        row_of = np.full(count, -1)
        for index, segment in enumerate(self._segments):
            rows = segment.rows_of(owner)
            places = segment.positions[rows] - first
            inside = (places >= 0) & (places < count)
            # Rows are in the order of writing, and of equal places the last assignment stays.
            segment_of[places[inside]] = index
            row_of[places[inside]] = rows[inside]
        found = segment_of >= 0
        used = np.unique(segment_of)
        if len(used) == 1 and found.all():
            return self._segments[used[0]].read(row_of).to(self.device), found
        gathered = torch.full((count, *self._row_shape), torch.nan, dtype=self._dtype, device=self.device)
        for index in used[used >= 0]:
            places = np.flatnonzero(segment_of == index)
            gathered[_index(places, self.device)] = self._segments[index].read(row_of[places]).to(self.device)
        return gathered, found

    def release(self, owner: int) -> None:
        """Forget the rows of one owner."""
        for segment in self._segments:
            segment.owners[segment.rows_of(owner)] = NOBODY
        *closed, last = self._segments or [None]
        kept = [segment for segment in closed if segment.is_needed()]
        # The segment that is being filled stays as long as any row is held.
        if last is not None and (kept or last.is_needed()):
            kept.append(last)
        self._segments = kept

    @property
    def num_rows(self) -> int:
        """Rows somebody will ask for."""
        return sum(int((segment.owners != NOBODY).sum()) for segment in self._segments)

    @property
    def device_bytes(self) -> int:
        """Memory held on the device."""
        return sum(segment.nbytes for segment in self._segments if not segment.spilled)

    @property
    def host_bytes(self) -> int:
        """Memory held by rows that no longer fitted on the device."""
        return sum(segment.nbytes for segment in self._segments if segment.spilled)

    def _open_segment(self) -> "_Segment":
        if not self._segments or not self._segments[-1].room:
            on_device = [segment for segment in self._segments if not segment.spilled]
            if len(on_device) >= self.max_segments:
                on_device[0].spill()
            self._segments.append(_Segment(self.rows_per_segment, self._row_shape, self._dtype, self.device))
            self.peak_device_bytes = max(self.peak_device_bytes, self.device_bytes)
            self.peak_host_bytes = max(self.peak_host_bytes, self.host_bytes)
        return self._segments[-1]


class _Segment:
    """A stretch of rows, filled from the front."""

    def __init__(self, size: int, row_shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
        self.owners = np.full(size, NOBODY, dtype=np.int64)
        self.positions = np.zeros(size, dtype=np.int64)
        self.spilled = False
        self._rows = torch.empty((size, *row_shape), dtype=dtype, device=device)
        self._used = 0

    @property
    def room(self) -> int:
        return len(self.owners) - self._used

    @property
    def nbytes(self) -> int:
        return self._rows.numel() * self._rows.element_size()

    def is_needed(self) -> bool:
        return bool((self.owners[: self._used] != NOBODY).any())

    def rows_of(self, owner: int) -> np.ndarray:
        return np.flatnonzero(self.owners[: self._used] == owner)

    def write(self, layers: Sequence[Tensor], owners: np.ndarray, positions: np.ndarray) -> None:
        start, stop = self._used, self._used + len(owners)
        for index, layer in enumerate(layers):
            self._rows[start:stop, index].copy_(layer)
        self.owners[start:stop] = owners
        self.positions[start:stop] = positions
        self._used = stop

    def read(self, rows: np.ndarray) -> Tensor:
        return self._rows[_index(rows, self._rows.device)]

    def spill(self) -> None:
        """Move the rows that are needed to host memory; nothing is added to them any more."""
        needed = np.flatnonzero(self.owners != NOBODY)
        self._rows = self._rows.cpu()[_index(needed, torch.device("cpu"))]
        self.owners, self.positions = self.owners[needed], self.positions[needed]
        self._used = len(needed)
        self.spilled = True


def _index(rows: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(rows).to(device)
