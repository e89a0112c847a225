"""The samples of runs, read for a page: the responses to some prompts, and what rank shaping did to all."""

import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from verl_pages.run_folder import SAMPLES, RunFolder, SampleFile, Series
from verl_pages.samples import PromptSamples, Row

MAX_RAW_BYTES = 64 << 20
"""Most bytes of samples of a page, in memory. Beyond it some prompts are left out, the same at every step."""

MAX_FILES = 500
"""Most files that are read of a run and split, spread over the steps."""

MAX_FILE_BYTES = 8 << 30
"""Largest file that is read, by its size in memory."""

BATCH_ROWS = 256
"""Rows of a file that are in memory at once."""

MAX_METRICS = 48
"""Most columns of rank metrics."""

METRIC_PREFIX = "metric/"
"""Prefix of the columns that hold rank metrics."""

PREFIX = "prefix/"
"""The same for lists of the rank metrics of every measured prefix of a response."""

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
"""Columns that the page shows, besides those of rank metrics."""

NEEDED = {"uid", "prompt", "response", "correct"}

CHANGES = (1e-6, 0.05, 0.2, 0.5)
"""Bounds of the classes of relative change by rank shaping; the last class has no bound."""

CHANGE_NAMES = ("unchanged", "up to 5%", "up to 20%", "up to 50%", "above 50%")


@dataclass
class GatheredSamples:
    """Samples of several runs."""

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
    gathered = GatheredSamples(shaping=[[] for _ in runs])
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
        except (OSError, pa.ArrowException, ValueError, KeyError, MemoryError) as error:
            # A run that goes on removes files when it has kept too many.
            if path.exists():
                reason = " ".join(str(error).split())[:120] or type(error).__name__
                damaged[number].append(f"{file.name}: cannot be read ({reason})")
            continue
        gathered.num_read += 1
        if shares is not None:
            gathered.shaping[number].append([file.step, *shares])
        for row in rows:
            key = (file.split, row["uid"], row["prompt"])
            prompt = prompts.setdefault(key, PromptSamples(*key, row["data_source"], _shown_truth(row["ground_truth"])))
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
    """Return the classes of ``GatheredSamples.shaping`` as metrics, ``samples/advantages/unchanged`` and so on."""
    steps, *shares = np.array(rows, dtype=np.float64).reshape(len(rows), len(CHANGE_NAMES) + 1).T
    named = zip(CHANGE_NAMES, shares, strict=True) if rows else ()
    return {f"samples/advantages/{name}": Series(steps.astype(np.int64), values) for name, values in named}


def _spread_files(files: Sequence[SampleFile]) -> list[SampleFile]:
    """At most ``MAX_FILES`` of each split, spread evenly, the first and the last among them."""
    kept = set()
    for split in ("train", "val"):
        of_split = [file for file in files if file.split == split]
        places = np.linspace(0, len(of_split) - 1, min(len(of_split), MAX_FILES)).round().astype(int)
        kept |= {of_split[place] for place in places}
    return sorted(kept)


def _raw_bytes(path: Path) -> int:
    """Return the size of a file's content in memory, as the file states it; 0 if it does not."""
    if not path.is_file():  # a pipe would wait for its writer
        return 0
    try:
        facts = pq.read_metadata(path)
        return sum(facts.row_group(i).total_byte_size for i in range(facts.num_row_groups))
    except (OSError, pa.ArrowException, ValueError):
        return 0


def _shown_truth(text: str) -> str:
    """Show a ground truth, JSON in the file; a text without its quotation marks and escapes."""
    try:
        truth = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return truth if isinstance(truth, str) else text


def _open(path: Path) -> pq.ParquetFile:
    """Open a file of samples that has the columns in ``NEEDED``."""
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
    """Columns that the page shows, with the types that they are cast to."""
    types = {}
    for name in file.schema_arrow.names:
        if name in COLUMN_TYPES:
            types[name] = COLUMN_TYPES[name]
        elif name.startswith((METRIC_PREFIX, PREFIX)):
            types[name] = pa.float64() if name.startswith(METRIC_PREFIX) else pa.large_list(pa.float64())
    return types


def _rows(file: pq.ParquetFile, fraction: float, split: str) -> Iterator[Row]:
    """Responses to the prompts that are shown. Reads ``BATCH_ROWS`` rows at a time."""
    types = _shown(file)
    for batch in file.iter_batches(BATCH_ROWS, columns=list(types)):
        table = pa.Table.from_batches([batch]).select(list(types)).cast(pa.schema(types.items()))
        uids = table["uid"].fill_null(-1).to_pylist()
        shown = [zlib.crc32(f"report {split} {uid}".encode()) < fraction * 2**32 for uid in uids]
        yield from map(_row, table.filter(pa.array(shown, pa.bool_())).to_pylist())


def _row(values: Row) -> Row:
    """One response of the page. Lists whose lengths do not match are left out."""
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
        "response": _conversation(values.get("conversation")) or values.get("response") or "",
        "uid": values["uid"] or 0,
        "verdict": "c" if values["correct"] else "w",
        "truncated": bool(values.get("truncated")),
        "extra": values.get("reward_extra_info") or "",
        "tokens": tokens,
        "prefix_rows": ends,
        "prefixes": prefixes,
        **per_token,
    }


def _conversation(text: str | None) -> str:
    """As :func:`spoken`, of JSON; empty if it is damaged."""
    try:
        return spoken(json.loads(text or "[]"))
    except (ValueError, RecursionError):
        return ""


def spoken(said: Any) -> str:
    """Show a conversation as text, with the environment's words framed; empty for any other form."""
    try:
        return "".join(
            part["text"] if part["by"] == "policy" else f"\n┌ environment\n{part['text']}\n└\n" for part in said
        )
    except (TypeError, KeyError):
        return ""


def _shaping_shares(file: pq.ParquetFile) -> list[float] | None:
    """Return the share of responses by relative change of the advantage through rank shaping.

    None if nothing is known of it, or no response has an advantage.
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
