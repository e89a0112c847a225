"""Temperatures that depend on the position in the response, vectorized over all requests of a step.

A request provides a table of temperatures in ``SamplingParams.extra_args``. Entry t applies to token t of the response,
and the last entry to all later tokens. The table index is derived from the position in the sequence, so it is not
affected by chunking, preemption or batching.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

KEY = "temperatures"
"""Key in ``SamplingParams.extra_args`` for a request's table, a float32 array [T] of positive temperatures."""


def table_of(params: Any) -> NDArray[np.float32] | None:
    """Return a request's temperature table, or None if the request has a single temperature."""
    table = None if params is None or params.extra_args is None else params.extra_args.get(KEY)
    return None if table is None else np.asarray(table, dtype=np.float32)


class TemperatureTables:
    """Temperature tables of the running requests, stacked in one array. Only the tables of new requests are copied."""

    def __init__(self) -> None:
        self._entries = np.ones((0, 1), dtype=np.float32)
        self._slots: dict[str, int] = {}

    def slots(self, request_ids: Sequence[str], tables: Sequence[NDArray[np.float32] | None]) -> NDArray[np.int64]:
        """Return the slot of each request's table, [B], or -1 if a request has no table. Discard all other tables."""
        by_name = {name: table for name, table in zip(request_ids, tables, strict=True) if table is not None}
        self._slots = {name: slot for name, slot in self._slots.items() if name in by_name}
        new = [name for name in by_name if name not in self._slots]
        self._grow(len(by_name), max((len(table) for table in by_name.values()), default=1))
        taken = set(self._slots.values())
        free = (slot for slot in range(len(self._entries)) if slot not in taken)
        for name, slot in zip(new, free, strict=False):
            table = by_name[name]
            self._entries[slot, : len(table)] = table
            self._entries[slot, len(table) :] = table[-1]
            self._slots[name] = slot
        return np.array([self._slots.get(name, -1) for name in request_ids], dtype=np.int64)

    def at(self, slots: NDArray[np.int64], places: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the temperature, [B], of the response token at index ``places`` [B] in each row (NaN for slot -1)."""
        values = self._entries[slots, np.clip(places, 0, self._entries.shape[1] - 1)]
        return np.where(slots < 0, np.float32(np.nan), values)

    def _grow(self, rows: int, columns: int) -> None:
        """Enlarge the array. Tables keep their slots, and each table's last entry fills the new columns."""
        have = self._entries.shape
        if rows > have[0] or columns > have[1]:
            grown = np.ones((max(2 * rows, have[0]), max(columns, have[1])), dtype=np.float32)
            grown[: have[0], : have[1]] = self._entries
            grown[: have[0], have[1] :] = self._entries[:, -1:]
            self._entries = grown
