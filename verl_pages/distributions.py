"""Computes histograms of the rewards, lengths and advantages of training responses, over the steps of a run."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

FIGURES = {
    "reward": ("Reward", "What advantages are made of."),
    "num_tokens": ("Tokens of a response", "Length of the responses, with those that were cut at the limit."),
    "advantage": ("Advantage", "Mean over a response's tokens, after rank shaping."),
}
"""Title and description of each histogram, by column of the sample files."""

NUM_BINS = 24
NUM_COLUMNS = 240
"""Maximum number of columns of a figure's histograms in total; in longer runs, each column holds several steps."""

LARGEST = 1e30
"""Size up to which values are shown; larger ones are damage, and their range would overflow."""

SAME = 1e-9
"""Range relative to the size of the values, and to 1, below which they are shown as equal."""

MAX_ROWS = 1 << 16
"""Maximum number of responses to read per step."""

Values = Mapping[str, npt.NDArray[np.float64]]
"""Finite values of one step's responses by column."""


def read_values(file: pq.ParquetFile) -> Values:
    """Read the columns in ``FIGURES`` that a sample file has, without values that are not finite or too large."""
    # Text that is stored once and repeated a million times is not read.
    numbers = (pa.types.is_floating, pa.types.is_integer, pa.types.is_boolean)
    types = {field.name: field.type for field in file.schema_arrow}
    names = [name for name in FIGURES if name in types and any(is_kind(types[name]) for is_kind in numbers)]
    batch = next(file.iter_batches(MAX_ROWS, columns=names), None) if names else None
    if batch is None:
        return {}
    columns = {name: batch[name].cast(pa.float64()).to_numpy(zero_copy_only=False) for name in names}
    # A comparison with NaN is false.
    return {name: column[np.abs(column) <= LARGEST] for name, column in columns.items()}


def histograms(runs: Sequence[Sequence[tuple[int, Values]]]) -> list[dict[str, Any]]:
    """Return the histograms of several runs, each given as steps with their values.

    The bins of a figure are the same for all runs and steps, so that histograms can be compared. Each entry has
    ``low`` and ``high``, the range of ``NUM_BINS`` equal bins, and ``runs``: for each run the columns as ``[first step,
    last step, shares]``, where shares are per mille.
    """
    found = []
    for name, (title, about) in FIGURES.items():
        present = [[(step, values[name]) for step, values in steps if len(values.get(name, ()))] for steps in runs]
        pieces = [values for steps in present for _, values in steps]
        if not pieces:
            continue
        low, high = min(float(v.min()) for v in pieces), max(float(v.max()) for v in pieces)
        size = max(1.0, abs(low), abs(high))
        if high - low < SAME * size:
            low, high = low - size / 2, high + size / 2
        most = max(12, min(60, NUM_COLUMNS // len(runs)))
        columns = [_columns(steps, most, low, high) for steps in present]
        found.append({"title": title, "about": about, "low": low, "high": high, "runs": columns})
    return found


def _columns(
    steps: Sequence[tuple[int, npt.NDArray[np.float64]]], most: int, low: float, high: float
) -> list[list[Any]]:
    columns = []
    for part in np.array_split(np.arange(len(steps)), min(len(steps), most)) if steps else ():
        counts, _ = np.histogram(np.concatenate([steps[place][1] for place in part]), NUM_BINS, (low, high))
        shares = np.rint(1000 * counts / counts.sum()).astype(int).tolist()
        columns.append([steps[part[0]][0], steps[part[-1]][0], shares])
    return columns
