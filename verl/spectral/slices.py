"""Long computations in slices, so that others can work in between.

A sliced computation is a generator: it pauses after every bounded piece of work and returns its result at the end.
One inside another is ``result = yield from inner(...)``.
"""

from collections.abc import Generator
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
Slices = Generator[Any, None, T]
"""Yields None, or the event of a GPU that must have happened before it goes on."""

SLICE_OPERATIONS = 2.0**28
"""Most floating-point operations of one product on a CPU between two pauses, unless 16 rows of it exceed them: a few
milliseconds on two cores."""


def finish(slices: Slices[T]) -> T:
    """The result of a sliced computation, without pauses."""
    while True:
        try:
            next(slices)
        except StopIteration as end:
            result: T = end.value
            return result


def fetch(values: Tensor) -> Slices[Tensor]:
    """``values`` on the host.

    On a GPU it pauses while they travel: a caller who comes back when the GPU has done its work does not wait.
    """
    if values.device.type == "cpu":
        return values
    fetched, event = values.to("cpu", non_blocking=True), torch.cuda.Event()
    event.record()
    yield event
    event.synchronize()
    return fetched


def add_product(out: Tensor, left: Tensor, right: Tensor, lower: bool = False) -> Slices[None]:
    """``out += left @ right`` in tiles of rows, ``[b, m, k] @ [b, k, n]``; with ``lower``, none above the diagonal."""
    rows, columns = out.shape[1:]
    tile = 128
    if out.device.type == "cpu":
        tile = min(tile, max(16, int(SLICE_OPERATIONS / (2 * len(out) * left.shape[2] * columns + 1))))
    for start in range(0, rows, tile):
        stop = min(start + tile, rows)
        last = stop if lower else columns
        out[:, start:stop, :last].baddbmm_(left[:, start:stop], right[:, :, :last])
        yield
