"""Reads run folders defensively, since they may be untrusted, damaged, or still being written.

Unreadable content is skipped and reported in ``RunFolder.troubles``.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from verl.config.errors import ConfigError
from verl.config.run_file import RUN_CONFIG, read_run_config

METRICS, START, SUMMARY = "metrics.jsonl", "start.json", "summary.json"
"""Files with a run's metrics (one JSON object per step), information about its last start, and its final results."""

SAMPLES = "samples"
"""Folder with a Parquet file of samples for each saved training step or validation."""

MAX_OBJECT_BYTES = 16 << 20
MAX_METRICS_BYTES = 1 << 30
MAX_LINE_BYTES = 4 << 20
"""Maximum size in bytes of a line of the metrics file. Each line records one step."""

MAX_NAMES = 4000
"""Maximum number of distinct metrics."""

MAX_OPTIONS = 5000
MAX_DEPTH = 16
"""Maximum nesting depth of options."""

MAX_VALUE = 400
"""Maximum displayed length of an option's value in characters."""

MAX_STEP = 10**9


class SampleFile(NamedTuple):
    """File of samples. Files are sorted by step and then by split, with training before validation."""

    step: int
    split: str
    """Data split, ``train`` or ``val``."""

    @property
    def name(self) -> str:
        return f"{self.split}_{self.step:06d}.parquet"


@dataclass
class Series:
    """Values of one metric, sorted by step."""

    steps: npt.NDArray[np.int64]
    values: npt.NDArray[np.float64]
    """Values of the metric. Non-finite values are NaN."""


@dataclass
class RunFolder:
    """Contents of a run folder."""

    path: Path
    name: str
    """Name of the run, which is unique on a page."""
    metrics: dict[str, Series] = field(default_factory=dict)
    options: dict[str, str] = field(default_factory=dict)
    """Maps dotted names of options, such as ``actor.optim.lr``, to their values as JSON."""
    summary: dict[str, Any] = field(default_factory=dict)
    """Contents of ``summary.json``, or an empty dict if the run is incomplete."""
    start: dict[str, Any] = field(default_factory=dict)
    """Contents of ``start.json``, or an empty dict for runs of older versions."""
    samples: list[SampleFile] = field(default_factory=list)
    troubles: list[str] = field(default_factory=list)

    @property
    def last_step(self) -> int:
        """Last recorded step, or 0 if no step was recorded."""
        return max((int(series.steps[-1]) for series in self.metrics.values()), default=0)

    @property
    def overrides(self) -> list[str]:
        """Options set on the command line, as ``name=value``."""
        words = self.start.get("overrides")
        return [word for word in words if isinstance(word, str)] if isinstance(words, list) else []

    def option(self, name: str) -> str | None:
        """Return an option's value as text, or None if it is missing."""
        text = self.options.get(name)
        return None if text is None else text.strip('"')


def sample_files(folder: Path) -> list[SampleFile]:
    """Return the complete sample files in ``folder``, sorted."""
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    found = [re.fullmatch(r"(train|val)_([0-9]{6}|[1-9][0-9]{6,11})\.parquet", name) for name in names]
    return sorted(SampleFile(int(match[2]), match[1]) for match in found if match)


def is_run(folder: Path) -> bool:
    """Return whether ``folder`` contains any output of a training run."""
    return (folder / METRICS).is_file() or (folder / RUN_CONFIG).is_file() or bool(sample_files(folder / SAMPLES))


def read_run(folder: Path, name: str) -> RunFolder:
    """Read the contents of a run folder, except for the samples themselves."""
    run = RunFolder(folder, name)
    run.options = _read_options(folder / RUN_CONFIG, run.troubles)
    run.summary = _read_object(folder / SUMMARY, run.troubles)
    run.start = _read_object(folder / START, run.troubles)
    run.metrics = _read_metrics(folder / METRICS, run.troubles)
    try:
        run.samples = sample_files(folder / SAMPLES)
    except OSError as error:
        run.troubles.append(f"{SAMPLES}: cannot be read ({error.strerror})")
    return run


def _read_options(path: Path, troubles: list[str]) -> dict[str, str]:
    try:
        tree = read_run_config(path)
    except ConfigError as error:
        troubles.append(f"{str(error).removeprefix(f'{path.parent}/')}; the options of this run are not known")
        return {}
    options: dict[str, str] = {}
    for name, value in _flat(tree):
        if len(options) == MAX_OPTIONS:
            troubles.append(f"{path.name}: more than {MAX_OPTIONS} options; the others are not shown")
            break
        options[name] = value
    return options


def _flat(tree: Mapping[Any, Any], prefix: str = "", depth: int = 0) -> Iterator[tuple[str, str]]:
    """Yield the dotted name of every option in ``tree``, and its value as JSON."""
    for key, value in tree.items():
        name = f"{prefix}{key}"[:MAX_VALUE]
        if isinstance(value, Mapping) and value and depth < MAX_DEPTH:
            yield from _flat(value, f"{name}.", depth + 1)
        else:
            yield name, _short_json(value)


def _short_json(value: Any) -> str:
    """Encode ``value`` as JSON, truncated to ``MAX_VALUE`` characters."""
    parts: list[str] = []
    size = 0
    try:
        for part in json.JSONEncoder(ensure_ascii=False, default=str).iterencode(value):
            parts.append(part)
            size += len(part)
            if size > MAX_VALUE:
                break
    except (ValueError, TypeError, RecursionError):
        parts.append("…")
    text = "".join(parts)
    return text if len(text) <= MAX_VALUE else text[:MAX_VALUE] + "…"


def _read_object(path: Path, troubles: list[str]) -> dict[str, Any]:
    """Return the JSON object in a file, or an empty dict if the file is missing or cannot be read."""
    try:
        # Skip pipes, since reading them might block forever.
        if not path.is_file():
            return {}
        if path.stat().st_size > MAX_OBJECT_BYTES:
            troubles.append(f"{path.name}: larger than {MAX_OBJECT_BYTES >> 20} MiB, not read")
            return {}
        found = json.loads(path.read_bytes())
        if not isinstance(found, dict):
            raise ValueError("not a mapping")
    except OSError as error:
        troubles.append(f"{path.name}: cannot be read ({error.strerror})")
    except (ValueError, RecursionError):
        troubles.append(f"{path.name}: is damaged, not used")
    else:
        return found
    return {}


def _read_metrics(path: Path, troubles: list[str]) -> dict[str, Series]:
    """Return all metrics by name, using the last record of each step if there are several."""
    records: dict[int, dict[str, float]] = {}
    damaged: list[int] = []
    if not path.is_file():
        troubles.append(f"{path.name}: missing, so there are no curves")
        return {}
    try:
        with path.open("rb") as file:
            for number, line in enumerate(_lines(file), start=1):
                record = None if line is None else _record(line)
                if record is None:
                    damaged.append(number)
                else:
                    records[record[0]] = record[1]
            if file.tell() >= MAX_METRICS_BYTES:
                troubles.append(f"{path.name}: only the first {MAX_METRICS_BYTES >> 20} MiB are read")
    except OSError as error:
        troubles.append(f"{path.name}: cannot be read to its end ({error.strerror})")
    if damaged:
        places = ", ".join(map(str, damaged[:5])) + (", ..." if len(damaged) > 5 else "")
        lines = "line" if len(damaged) == 1 else "lines"
        troubles.append(f"{path.name}: {len(damaged)} damaged {lines} left out ({lines} {places})")
    return _series(records, troubles)


def _lines(file: Any) -> Iterator[bytes | None]:
    """Yield the lines of a file, with None in place of lines that are too long."""
    left = MAX_METRICS_BYTES
    is_rest = False  # inside a line that is too long
    while left > 0 and (line := file.readline(MAX_LINE_BYTES)):
        left -= len(line)
        complete = line.endswith(b"\n") or len(line) < MAX_LINE_BYTES
        if not complete and not is_rest:
            yield None
        elif complete and not is_rest and line.strip():
            yield line
        is_rest = not complete


def _record(line: bytes) -> tuple[int, dict[str, float]] | None:
    """Return the step and the numeric values in a line, or None if the line is damaged."""
    try:
        values = json.loads(line)
        step = values.pop("step")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step <= MAX_STEP:
        return None
    numbers = {name: value for name, value in values.items() if value is None or type(value) in (int, float)}
    return step, {name: _finite_or_nan(value) for name, value in numbers.items()}


def _finite_or_nan(value: float | None) -> float:
    """Convert non-finite values, which trackers record as null, to NaN."""
    try:
        number = math.nan if value is None else float(value)
    except OverflowError:
        return math.nan
    return number if math.isfinite(number) else math.nan


def _series(records: Mapping[int, Mapping[str, float]], troubles: list[str]) -> dict[str, Series]:
    points: dict[str, list[tuple[int, float]]] = {}
    for step in sorted(records):
        for name, value in records[step].items():
            points.setdefault(name, []).append((step, value))
    if len(points) > MAX_NAMES:
        troubles.append(f"{METRICS}: more than {MAX_NAMES} metrics; the others are not shown")
    series = {}
    for name in sorted(list(points)[:MAX_NAMES]):
        steps, values = zip(*points[name], strict=True)
        series[name] = Series(np.array(steps, dtype=np.int64), np.array(values, dtype=np.float64))
    return series
