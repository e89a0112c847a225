"""Computes histograms of the rewards, lengths and advantages of training responses over the course of a run."""

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
"""Maps columns of the sample files to the title and description of their histograms."""

NUM_BINS = 24
NUM_COLUMNS = 240
"""Maximum total number of columns in a figure's histograms. In longer runs, a column covers several steps."""

LARGEST = 1e30
"""Maximum absolute value that is shown. Larger values indicate damaged data and could cause overflows."""

SAME = 1e-9
"""Values are shown as equal if their range is below this fraction of the largest absolute value (at least 1)."""

MAX_ROWS = 1 << 16
"""Maximum number of responses to read per step."""

Values = Mapping[str, npt.NDArray[np.float64]]
"""Maps columns to the finite values of one step's responses."""


def read_values(file: pq.ParquetFile) -> Values:
    """Read the columns in ``FIGURES`` from a sample file, leaving out values that are too large or not finite."""
    # Skip text columns, which could contain a text that is stored once and repeated a million times.
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
    """Return the histograms of several runs. Each run is a sequence of pairs (step, values).

    All runs and steps in a figure share the same bins, so that their histograms can be compared. In each figure,
    ``NUM_BINS`` equal bins cover the range from ``low`` to ``high``, and ``runs`` contains a list of columns per run. A
    column is ``[first step, last step, shares]``, where ``shares`` is the per mille of responses in each bin.
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
