"""The samples of runs, read for a page: the responses to some prompts, and what rank shaping did to all."""

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from verl_pages.run_folder import SAMPLES, RunFolder, SampleFile
from verl_pages.samples import PromptSamples, Row

MAX_RAW_BYTES = 64 << 20
"""Of the samples of a page as they are in memory. Beyond it some prompts are left out, the same at every step."""

MAX_FILES = 500
"""Files of a run and split that are read, spread over the steps."""

MAX_FILE_BYTES = 8 << 30
"""Of one file as it would be in memory."""

BATCH_ROWS = 256
"""Rows of a file that are in memory at once."""

MAX_METRICS = 48
"""Columns of rank metrics."""

FIGURES = ("score", "num_tokens", "logprob", "entropy", "reward", "advantage_0", "advantage", "phi")
TEXTS = ("data_source", "ground_truth", "answer", "reason", "reward_extra_info")
TOKENS = ("tokens", "token_logprobs", "token_entropies")

METRIC_PREFIX = "metric/"
"""Prefix of the columns that hold rank metrics."""

PREFIX_ROWS = "prefix_rows"
PREFIX = "prefix/"
"""The same for lists of the rank metrics of every measured prefix of a response."""

CHANGES = (1e-6, 0.05, 0.2, 0.5)
"""Bounds of the classes of relative change by rank shaping; the last class has no bound."""


@dataclass
class GatheredSamples:
    """What was read of several runs' samples."""

    prompts: list[PromptSamples] = field(default_factory=list)
    metrics: list[str] = field(default_factory=list)
    """Columns of rank metrics, without their prefix."""
    prefixes: list[str] = field(default_factory=list)
    """Rank metrics of prefixes that some response has."""
    shaping: list[list[list[Any]]] = field(default_factory=list)
    """For each run ``[step, share of each class of change]``, the classes of ``CHANGES``."""
    fraction: float = 1.0
    """Share of the prompts that was read."""
    num_files: int = 0
    num_read: int = 0


def gather_samples(runs: Sequence[RunFolder], max_raw: int = MAX_RAW_BYTES) -> GatheredSamples:
    """Read the samples of ``runs``; whatever cannot be read costs itself, and a line in its run's ``troubles``."""
    found = GatheredSamples(shaping=[[] for _ in runs])
    chosen = [_spread_files(run.samples) for run in runs]
    size = sum(
        _raw_bytes(run.path / SAMPLES / file.name) for run, files in zip(runs, chosen, strict=True) for file in files
    )
    found.fraction = min(1.0, max_raw / size) if size else 1.0
    found.num_files = sum(len(run.samples) for run in runs)
    prompts: dict[tuple[str, int, str], PromptSamples] = {}
    metrics: dict[str, None] = {}
    prefixes: dict[str, None] = {}
    left = 8 * max_raw
    for number, (run, files) in enumerate(zip(runs, chosen, strict=True)):
        damaged: list[str] = []
        for file in files:
            path = run.path / SAMPLES / file.name
            try:
                opened = _open(path)
                rows = []
                for row in _rows(opened, found.fraction, file.split):
                    rows.append(row)
                    left -= _size(row)
                    if left < 0:
                        raise ValueError("holds more than its metadata says")
                shares = _shaping_shares(opened) if file.split == "train" else None
            except (OSError, pa.ArrowException, ValueError, KeyError, MemoryError) as error:
                # A run that goes on removes files when it has kept too many.
                if path.exists():
                    damaged.append(f"{file.name}: {_reason(error)}")
                continue
            found.num_read += 1
            metrics |= dict.fromkeys(name for name in _wanted(opened) if name.startswith(METRIC_PREFIX))
            if shares is not None:
                found.shaping[number].append([file.step, *shares])
            for row in rows:
                prefixes |= dict.fromkeys(row["prefixes"])
                _add(prompts, number, file, row)
        run.troubles += [f"{SAMPLES}/{line}" for line in damaged[:3]]
        if len(damaged) > 3:
            run.troubles.append(f"{SAMPLES}: {len(damaged) - 3} more files cannot be read")
    found.metrics = [name.removeprefix(METRIC_PREFIX) for name in metrics][:MAX_METRICS]
    found.prefixes = list(prefixes)[:MAX_METRICS]
    found.prompts = list(prompts.values())
    return found


def _reason(error: Exception) -> str:
    return f"cannot be read ({' '.join(str(error).split())[:120] or type(error).__name__})"


def _spread_files(files: Sequence[SampleFile]) -> list[SampleFile]:
    """At most ``MAX_FILES`` of each split, spread evenly, the first and the last among them."""
    kept = set()
    for split in ("train", "val"):
        own = [file for file in files if file.split == split]
        places = np.linspace(0, len(own) - 1, min(len(own), MAX_FILES)).round().astype(int)
        kept |= {own[place] for place in places}
    return [file for file in files if file in kept]


def _raw_bytes(path: Path) -> int:
    """The size of a file's content in memory, as it says itself; 0 if it does not."""
    if not path.is_file():  # a pipe would wait for its writer
        return 0
    try:
        facts = pq.read_metadata(path)
        return sum(facts.row_group(i).total_byte_size for i in range(facts.num_row_groups))
    except (OSError, pa.ArrowException, ValueError):
        return 0


def _open(path: Path) -> pq.ParquetFile:
    """A file of samples that has what the page needs at least."""
    if not path.is_file():
        raise OSError("is not a regular file")
    if _raw_bytes(path) > MAX_FILE_BYTES:
        raise ValueError(f"more than {MAX_FILE_BYTES >> 30} GiB in memory")
    file = pq.ParquetFile(path)
    missing = {"uid", "prompt", "response", "correct"} - set(file.schema_arrow.names)
    if missing:
        raise ValueError(f"column {min(missing)} is missing")
    return file


def _wanted(file: pq.ParquetFile) -> list[str]:
    """The columns that the page shows."""
    known = {"uid", "sample", "prompt", "response", "correct", "truncated", PREFIX_ROWS, *FIGURES, *TEXTS, *TOKENS}
    return [name for name in file.schema_arrow.names if name in known or name.startswith((METRIC_PREFIX, PREFIX))]


def _rows(file: pq.ParquetFile, fraction: float, split: str) -> Iterator[Row]:
    """The responses to those prompts that are shown; never the whole file at once."""
    for batch in file.iter_batches(BATCH_ROWS, columns=_wanted(file)):
        table = pa.Table.from_batches([batch])
        uids = table["uid"].cast(pa.int64()).fill_null(-1).to_pylist()
        shown = [zlib.crc32(f"report {split} {uid}".encode()) < fraction * 2**32 for uid in uids]
        part = table.filter(pa.array(shown, pa.bool_()))
        columns = {name: part[name].to_pylist() for name in _plain_columns(part)}
        for i in range(len(part)):
            yield _row({name: values[i] for name, values in columns.items()})


def _plain_columns(table: pa.Table) -> Iterator[str]:
    """The columns of the types that they should have."""
    for column in table.schema:
        kind, name = column.type, column.name
        is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
        is_number = pa.types.is_floating(kind) or pa.types.is_integer(kind)
        if name in ("prompt", "response", *TEXTS):
            if is_text:
                yield name
        elif name in TOKENS or name == PREFIX_ROWS or name.startswith(PREFIX):
            if pa.types.is_list(kind) or pa.types.is_large_list(kind):
                yield name
        elif is_number or pa.types.is_boolean(kind):
            yield name


def _row(values: Row) -> Row:
    """What the page needs of one response."""
    tokens = _numbers_or_texts(values.get("tokens"), str)
    prefix_rows = _numbers_or_texts(values.get(PREFIX_ROWS), int) or []
    prefixes = {
        name.removeprefix(PREFIX): own
        for name in values
        if name.startswith(PREFIX) and (own := _numbers_or_texts(values[name], float)) and len(own) == len(prefix_rows)
    }
    per_token = {
        name: own
        for name in ("token_logprobs", "token_entropies")
        if tokens and (own := _numbers_or_texts(values.get(name), float)) and len(own) == len(tokens)
    }
    return {
        **{name: values.get(name) for name in values if name.startswith(METRIC_PREFIX) or name in FIGURES},
        **{name: values.get(name) or "" for name in ("prompt", "response", *TEXTS)},
        "uid": values["uid"] or 0,
        "verdict": "c" if values["correct"] else "w",
        "truncated": bool(values.get("truncated")),
        "extra": values.get("reward_extra_info") or "",
        "tokens": tokens,
        "prefix_rows": prefix_rows,
        "prefixes": prefixes if tokens else {},
        **per_token,
    }


def _numbers_or_texts(values: Any, kind: type) -> list[Any] | None:
    """A list whose entries are all of ``kind``, missing numbers as NaN; None for anything else."""
    if not isinstance(values, list) or not values:
        return None
    if kind is float:
        values = [float("nan") if value is None else value for value in values]
    return values if all(isinstance(value, kind) for value in values) else None


def _add(prompts: dict[tuple[str, int, str], PromptSamples], run: int, file: SampleFile, row: Row) -> None:
    key = (file.split, row["uid"], row["prompt"])
    if key not in prompts:
        prompts[key] = PromptSamples(*key, row["data_source"], row["ground_truth"])
    prompts[key].cells.setdefault((run, file.step), []).append(row)


def _size(row: Row) -> int:
    """About what a response takes in memory."""
    return len(row["prompt"]) + len(row["response"]) + 32 * len(row["tokens"] or ()) + 256


def _shaping_shares(file: pq.ParquetFile) -> list[float] | None:
    """The share of responses in each class of relative change between the advantage before and after rank shaping.

    None if nothing is known of it, or no response has an advantage.
    """
    names = ["advantage_0", "advantage"]
    if not set(names) <= set(file.schema_arrow.names):
        return None
    table = file.read(columns=names)
    before, after = (_floats(table[name]) for name in names)
    used = np.isfinite(before) & np.isfinite(after) & (before != 0)
    if not used.any():
        return None
    change = np.abs(after[used] / before[used] - 1)
    counts = np.bincount(np.digitize(change, CHANGES), minlength=len(CHANGES) + 1)
    return [round(float(count) / int(used.sum()), 4) for count in counts]


def _floats(column: pa.ChunkedArray) -> Any:
    return column.cast(pa.float64()).to_numpy(zero_copy_only=False)
