"""Buffer of hidden states, stored as rows in the order of computation and looked up by owner and position.

Each step appends its rows as one contiguous slice, which is cheap on a device. Alternatives, such as a clone per step
or a scatter to per-request locations, slow down decoding by a third. The owners of rows are recorded on the host. Rows
are stored in segments of fixed size, and a segment is freed when its last row is released.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

SEGMENT_BYTES = 32 << 20
"""Maximum size of a segment in bytes. Small segments are freed sooner, while large ones are allocated less often."""

NOBODY = -1
"""Owner id of rows that are not needed."""


class RowBuffer:
    """Buffer of rows ``[num_layers, width]`` with their owners and positions.

    Device memory is allocated in segments of at most ``min(SEGMENT_BYTES, max_bytes / 4)``, and at most ``max_bytes``
    in total. When the buffer is full, the oldest rows move to host memory. An empty buffer uses no memory.
    """

    def __init__(
        self, num_layers: int, width: int, dtype: torch.dtype, device: torch.device | str, max_bytes: int
    ) -> None:
        self.device = torch.device(device)
        self.dtype = dtype
        self.peak_device_bytes = 0
        self.peak_host_bytes = 0
        self._max_bytes = max_bytes
        self._segments: list[_Segment] = []
        self._set_row_shape(num_layers, width)

    def append(self, layers: Sequence[Tensor], owners: np.ndarray, positions: np.ndarray) -> None:
        """Add rows. A row replaces an earlier row with the same owner and position.

        Args:
            layers: Rows of each layer, ``[num_rows, width]``. The first rows determine the width, which for a few
                models differs from the hidden size in their config.
            owners: Owner of each row, int64 ``[num_rows]``, or ``NOBODY`` for rows that are not needed.
            positions: Position of each row, integers ``[num_rows]``.
        """
        if not self._segments and layers[0].shape[1] != self.row_shape[1]:
            self._set_row_shape(len(layers), layers[0].shape[1])
        start = 0
        while start < len(owners):
            segment = self._open_segment()
            stop = min(len(owners), start + segment.room)
            segment.write([layer[start:stop] for layer in layers], owners[start:stop], positions[start:stop])
            start = stop

    def gather(self, owner: int, first: int, count: int) -> tuple[Tensor, np.ndarray]:
        """Return an owner's rows at positions ``first`` to ``first + count - 1``.

        Returns:
            The rows ``[count, num_layers, width]`` on the device, with NaN for missing rows, and a bool mask
            ``[count]`` that is true for rows that are present.
        """
        present = np.zeros(count, dtype=bool)
        pieces: list[tuple[np.ndarray, Tensor]] = []
        for segment in self._segments:
            rows = segment.rows_of(owner)
            places = segment.positions[rows] - first
            inside = (places >= 0) & (places < count)
            if inside.any():
                # Rows are in write order, so the latest of several rows at the same place wins.
                row_of = np.full(count, -1)
                row_of[places[inside]] = rows[inside]
                filled = np.flatnonzero(row_of >= 0)
                present[filled] = True
                pieces.append((filled, segment.read(row_of[filled])))
        if len(pieces) == 1 and present.all():
            return pieces[0][1], present
        gathered = torch.full((count, *self.row_shape), torch.nan, dtype=self.dtype, device=self.device)
        for filled, values in pieces:
            gathered[_index(filled, self.device)] = values
        return gathered, present

    def release(self, owner: int) -> None:
        """Discard an owner's rows."""
        for segment in self._segments:
            segment.release(owner)
        kept = [segment for segment in self._segments[:-1] if segment.num_needed]
        # Keep the segment that is being filled as long as any other segment is kept.
        kept += [segment for segment in self._segments[-1:] if kept or segment.num_needed]
        self._segments = kept

    def clear(self) -> None:
        """Discard all rows and reset the peak memory statistics."""
        self._segments = []
        self.peak_device_bytes = self.peak_host_bytes = 0

    @property
    def num_rows(self) -> int:
        """Number of rows that are still needed."""
        return sum(segment.num_needed for segment in self._segments)

    @property
    def device_bytes(self) -> int:
        """Bytes of device memory used."""
        return sum(segment.nbytes for segment in self._segments if not segment.spilled)

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory used for rows that did not fit on the device."""
        return sum(segment.nbytes for segment in self._segments if segment.spilled)

    def _set_row_shape(self, num_layers: int, width: int) -> None:
        self.row_shape = (num_layers, width)
        self.row_bytes = num_layers * width * self.dtype.itemsize
        if self.row_bytes > self._max_bytes:
            raise ValueError(
                f"max_bytes={self._max_bytes}: one row of {num_layers} x {width} {self.dtype} takes {self.row_bytes}"
            )
        self.rows_per_segment = max(1, min(SEGMENT_BYTES, self._max_bytes // 4) // self.row_bytes)
        self.max_segments = self._max_bytes // (self.rows_per_segment * self.row_bytes)

    def _open_segment(self) -> "_Segment":
        if not self._segments or not self._segments[-1].room:
            on_device = [segment for segment in self._segments if not segment.spilled]
            if len(on_device) >= self.max_segments:
                on_device[0].spill()
            self._segments.append(_Segment(self.rows_per_segment, self.row_shape, self.dtype, self.device))
            self.peak_device_bytes = max(self.peak_device_bytes, self.device_bytes)
            self.peak_host_bytes = max(self.peak_host_bytes, self.host_bytes)
        return self._segments[-1]


class _Segment:
    """Storage for a fixed number of rows, filled in order."""

    def __init__(self, size: int, row_shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
        self.owners = np.full(size, NOBODY, dtype=np.int64)
        self.positions = np.zeros(size, dtype=np.int64)
        self.num_needed = 0
        self.spilled = False
        self._device = device
        self._rows = torch.empty((size, *row_shape), dtype=dtype, device=device)
        self._arrived: Any = None
        self._used = 0
        self._sorted: tuple[np.ndarray, np.ndarray] | None = None

    @property
    def room(self) -> int:
        return len(self.owners) - self._used

    @property
    def nbytes(self) -> int:
        return self._rows.numel() * self._rows.element_size()

    def write(self, layers: Sequence[Tensor], owners: np.ndarray, positions: np.ndarray) -> None:
        start, stop = self._used, self._used + len(owners)
        for index, layer in enumerate(layers):
            self._rows[start:stop, index].copy_(layer)
        self.owners[start:stop] = owners
        self.positions[start:stop] = positions
        self.num_needed += int(np.count_nonzero(owners != NOBODY))
        self._used = stop

    def rows_of(self, owner: int) -> np.ndarray:
        """Return the indices of an owner's unreleased rows in the order in which they were written."""
        if self.room:
            return np.flatnonzero(self.owners[: self._used] == owner)
        # A full segment does not change, so it is sorted once for all owners. The result still includes released rows.
        if self._sorted is None:
            order = np.argsort(self.owners, kind="stable")
            self._sorted = order, self.owners[order]
        order, owners = self._sorted
        rows = order[np.searchsorted(owners, owner) : np.searchsorted(owners, owner, side="right")]
        unreleased: np.ndarray = rows[self.owners[rows] == owner]
        return unreleased

    def release(self, owner: int) -> None:
        rows = self.rows_of(owner)
        self.owners[rows] = NOBODY
        self.num_needed -= len(rows)

    def read(self, rows: np.ndarray) -> Tensor:
        """Return the rows with the given indices, on the device."""
        if self._arrived is None:
            return self._rows[_index(rows, self._rows.device)]
        if not self._arrived.query():
            self._arrived.synchronize()
        chosen = torch.empty((len(rows), *self._rows.shape[1:]), dtype=self._rows.dtype, pin_memory=True)
        torch.index_select(self._rows, 0, torch.from_numpy(rows), out=chosen)
        return chosen.to(self._device, non_blocking=True)

    def spill(self) -> None:
        """Move the rows to host memory. No more rows can be added afterwards."""
        self.spilled = True
        if self._device.type == "cuda":
            # Copy all rows unfiltered and asynchronously: later work on the device is ordered after the copy.
            held = torch.empty(self._rows.shape, dtype=self._rows.dtype, pin_memory=True)
            self._rows = held.copy_(self._rows, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()
            self._used = len(self.owners)
            return
        needed = np.flatnonzero(self.owners != NOBODY)
        self._rows = self._rows.cpu()[_index(needed, torch.device("cpu"))]
        self.owners, self.positions = self.owners[needed], self.positions[needed]
        self._used = len(needed)
        self._sorted = None


def _index(rows: np.ndarray, device: torch.device) -> Tensor:
    index = torch.from_numpy(rows)
    # A copy from pinned memory does not wait for the device.
    return index.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else index.to(device)
