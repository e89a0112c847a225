"""Reads the samples for a page: responses to a subset of prompts, and rank shaping statistics of all responses."""

import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from verl_pages.distributions import Values, read_values
from verl_pages.run_folder import SAMPLES, RunFolder, SampleFile, Series
from verl_pages.samples import PromptSamples, Row

MAX_RAW_BYTES = 64 << 20
"""Maximum size in memory of a page's samples. If a page would exceed it, the same prompts are omitted at all steps."""

MAX_FILES = 500
"""Maximum number of files to read per run and split. The files are evenly spaced over the steps."""

MAX_FILE_BYTES = 8 << 30
"""Maximum size in memory of a file to read."""

BATCH_ROWS = 256
"""Number of rows to read from a file at a time."""

MAX_METRICS = 48
"""Maximum number of rank metric columns."""

METRIC_PREFIX = "metric/"
"""Prefix of rank metric columns."""

PREFIX = "prefix/"
"""Prefix of list columns with the values of a rank metric for each measured prefix of a response."""

FIGURES = (
    "score",
    "num_tokens",
    "turns",
    "calls",
    "failures",
    "environment_reward",
    "logprob",
    "entropy",
    "reward",
    "advantage_0",
    "advantage",
    "phi",
)
TEXTS = ("prompt", "response", "data_source", "ground_truth", "answer", "reason", "reward_extra_info", "conversation")
PER_TOKEN = ("token_logprobs", "token_entropies")

COLUMN_TYPES = {
    "uid": pa.int64(),
    "correct": pa.bool_(),
    "truncated": pa.bool_(),
    "tokens": pa.large_list(pa.large_string()),
    "prefix_rows": pa.large_list(pa.int64()),
    **dict.fromkeys(PER_TOKEN, pa.large_list(pa.float64())),
    **dict.fromkeys(TEXTS, pa.large_string()),
    **dict.fromkeys(FIGURES, pa.float64()),
}
"""Types of the columns shown on the page, except for rank metrics."""

NEEDED = {"uid", "prompt", "response", "correct"}

CHANGES = (1e-6, 0.05, 0.2, 0.5)
"""Upper bounds of the classes of relative advantage changes due to rank shaping. The last class is unbounded."""

CHANGE_NAMES = ("unchanged", "up to 5%", "up to 20%", "up to 50%", "above 50%")


@dataclass
class GatheredSamples:
    """Samples of several runs."""

    prompts: list[PromptSamples] = field(default_factory=list)
    metrics: list[str] = field(default_factory=list)
    """Names of the rank metrics, without the column prefix."""
    prefixes: list[str] = field(default_factory=list)
    """Names of the rank metrics that were measured on prefixes of at least one response."""
    shaping: list[list[list[Any]]] = field(default_factory=list)
    """For each run, one entry per step: the step and the fraction of responses in each class of ``CHANGES``."""
    values: list[list[tuple[int, Values]]] = field(default_factory=list)
    """For each run, pairs of a step and the rewards, lengths and advantages of its responses."""
    fraction: float = 1.0
    """Fraction of the prompts whose responses were read."""
    num_files: int = 0
    num_read: int = 0


def gather_samples(runs: Sequence[RunFolder], max_raw: int = MAX_RAW_BYTES) -> GatheredSamples:
    """Read the samples of ``runs``. Files that cannot be read are skipped and reported in their run's ``troubles``."""
    gathered = GatheredSamples(shaping=[[] for _ in runs], values=[[] for _ in runs])
    chosen = [(number, run, file) for number, run in enumerate(runs) for file in _spread_files(run.samples)]
    size = sum(_raw_bytes(run.path / SAMPLES / file.name) for _, run, file in chosen)
    gathered.fraction = min(1.0, max_raw / size) if size else 1.0
    gathered.num_files = sum(len(run.samples) for run in runs)
    prompts: dict[tuple[str, int, str], PromptSamples] = {}
    damaged: list[list[str]] = [[] for _ in runs]
    left = 8 * max_raw
    for number, run, file in chosen:
        path = run.path / SAMPLES / file.name
        try:
            opened = _open(path)
            rows = []
            for row in _rows(opened, gathered.fraction, file.split):
                rows.append(row)
                left -= len(row["prompt"]) + len(row["response"]) + 32 * len(row["tokens"] or ()) + 256
                if left < 0:
                    raise ValueError("holds more than its metadata says")
            shares = _shaping_shares(opened) if file.split == "train" else None
            values = read_values(opened) if file.split == "train" else {}
        except (OSError, pa.ArrowException, ValueError, KeyError, MemoryError) as error:
            # Active runs delete old files to limit their number, so do not report missing files as damaged.
            if path.exists():
                reason = " ".join(str(error).split())[:120] or type(error).__name__
                damaged[number].append(f"{file.name}: cannot be read ({reason})")
            continue
        gathered.num_read += 1
        gathered.values[number].append((file.step, values))
        if shares is not None:
            gathered.shaping[number].append([file.step, *shares])
        for row in rows:
            key = (file.split, row["uid"], row["prompt"])
            prompt = prompts.setdefault(key, PromptSamples(*key, row["data_source"], shown_truth(row["ground_truth"])))
            prompt.cells.setdefault((number, file.step), []).append(row)
        gathered.metrics += [
            name.removeprefix(METRIC_PREFIX) for name in _shown(opened) if name.startswith(METRIC_PREFIX)
        ]
        gathered.prefixes += [name for row in rows for name in row["prefixes"]]
        gathered.metrics, gathered.prefixes = (
            list(dict.fromkeys(names))[:MAX_METRICS] for names in (gathered.metrics, gathered.prefixes)
        )
    for run, lines in zip(runs, damaged, strict=True):
        run.troubles += [f"{SAMPLES}/{line}" for line in lines[:3]]
        if len(lines) > 3:
            run.troubles.append(f"{SAMPLES}: {len(lines) - 3} more files cannot be read")
    gathered.prompts = list(prompts.values())
    return gathered


def shaping_metrics(rows: Sequence[Sequence[Any]]) -> dict[str, Series]:
    """Convert a run's rows in ``GatheredSamples.shaping`` to metrics such as ``samples/advantages/unchanged``."""
    steps, *shares = np.array(rows, dtype=np.float64).reshape(len(rows), len(CHANGE_NAMES) + 1).T
    named = zip(CHANGE_NAMES, shares, strict=True) if rows else ()
    return {f"samples/advantages/{name}": Series(steps.astype(np.int64), values) for name, values in named}


def _spread_files(files: Sequence[SampleFile]) -> list[SampleFile]:
    """Select at most ``MAX_FILES`` evenly spaced files per split, including the first and the last file."""
    kept = set()
    for split in ("train", "val"):
        of_split = [file for file in files if file.split == split]
        places = np.linspace(0, len(of_split) - 1, min(len(of_split), MAX_FILES)).round().astype(int)
        kept |= {of_split[place] for place in places}
    return sorted(kept)


def _raw_bytes(path: Path) -> int:
    """Return the size in memory of a file's content according to its metadata, or 0 if the metadata cannot be read."""
    if not path.is_file():  # opening a pipe would block until there is a writer
        return 0
    try:
        facts = pq.read_metadata(path)
        return sum(facts.row_group(i).total_byte_size for i in range(facts.num_row_groups))
    except (OSError, pa.ArrowException, ValueError):
        return 0


def shown_truth(text: str) -> str:
    """Format a ground truth stored as JSON. Strings are unquoted, and null becomes an empty string.

    For mappings with the key ``answer``, such as generated problems, only the answer is shown.
    """
    try:
        truth = json.loads(text)
    except (ValueError, RecursionError):
        return text
    truth = truth.get("answer", truth) if isinstance(truth, dict) else truth
    return truth if isinstance(truth, str) else text * (truth is not None)


def _open(path: Path) -> pq.ParquetFile:
    """Open a sample file, checking that it is not too large and contains the columns ``NEEDED``."""
    if not path.is_file():
        raise OSError("is not a regular file")
    if _raw_bytes(path) > MAX_FILE_BYTES:
        raise ValueError(f"more than {MAX_FILE_BYTES >> 30} GiB in memory")
    file = pq.ParquetFile(path)
    missing = NEEDED - set(file.schema_arrow.names)
    if missing:
        raise ValueError(f"column {min(missing)} is missing")
    return file


def _shown(file: pq.ParquetFile) -> dict[str, pa.DataType]:
    """Return the columns of a file that are shown on the page, and the types to cast them to."""
    types = {}
    for name in file.schema_arrow.names:
        if name in COLUMN_TYPES:
            types[name] = COLUMN_TYPES[name]
        elif name.startswith((METRIC_PREFIX, PREFIX)):
            types[name] = pa.float64() if name.startswith(METRIC_PREFIX) else pa.large_list(pa.float64())
    return types


def _rows(file: pq.ParquetFile, fraction: float, split: str) -> Iterator[Row]:
    """Yield the responses to a ``fraction`` of the prompts, reading ``BATCH_ROWS`` rows at a time."""
    types = _shown(file)
    for batch in file.iter_batches(BATCH_ROWS, columns=list(types)):
        table = pa.Table.from_batches([batch]).select(list(types)).cast(pa.schema(types.items()))
        uids = table["uid"].fill_null(-1).to_pylist()
        shown = [zlib.crc32(f"report {split} {uid}".encode()) < fraction * 2**32 for uid in uids]
        yield from map(_row, table.filter(pa.array(shown, pa.bool_())).to_pylist())


def _row(values: Row) -> Row:
    """Convert a row of a sample file to a response on the page, and drop lists of the wrong length."""
    tokens, ends = values.get("tokens"), values.get("prefix_rows") or []
    if not tokens or None in tokens:
        tokens, ends = None, []
    prefixes = {
        name.removeprefix(PREFIX): ranks
        for name, ranks in values.items()
        if name.startswith(PREFIX) and ranks and len(ranks) == len(ends) and None not in ends
    }
    per_token = {name: values[name] for name in PER_TOKEN if tokens and len(values.get(name) or ()) == len(tokens)}
    return {
        **{name: value for name, value in values.items() if name.startswith(METRIC_PREFIX) or name in FIGURES},
        **{name: values.get(name) or "" for name in TEXTS},
        "response": spoken(values.get("conversation") or "") or values.get("response") or "",
        "uid": values["uid"] or 0,
        "verdict": "c" if values["correct"] else "w",
        "truncated": bool(values.get("truncated")),
        "extra": values.get("reward_extra_info") or "",
        "tokens": tokens,
        "prefix_rows": ends,
        "prefixes": prefixes,
        **per_token,
    }


def spoken(said: Any) -> str:
    """Format a conversation or its JSON as text, framing the environment's parts. Return "" if it is malformed."""
    try:
        parts = json.loads(said) if isinstance(said, str) else said
        return "".join(
            part["text"] if part["by"] == "policy" else f"\n┌ environment\n{part['text']}\n└\n" for part in parts
        )
    except (ValueError, RecursionError, TypeError, KeyError):
        return ""


def _shaping_shares(file: pq.ParquetFile) -> list[float] | None:
    """Return the fraction of responses in each class of relative advantage changes (see ``CHANGES``).

    Return None if the file has no finite nonzero advantages.
    """
    names = ["advantage_0", "advantage"]
    if not set(names) <= set(file.schema_arrow.names):
        return None
    table = file.read(columns=names)
    before, after = (table[name].cast(pa.float64()).to_numpy(zero_copy_only=False) for name in names)
    used = np.isfinite(before) & np.isfinite(after) & (before != 0)
    if not used.any():
        return None
    change = np.abs(after[used] / before[used] - 1)
    counts = np.bincount(np.digitize(change, CHANGES), minlength=len(CHANGES) + 1)
    return [round(float(count) / int(used.sum()), 4) for count in counts]
