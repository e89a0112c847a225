"""Results of an evaluation: the samples of a checkpoint on a benchmark with their verdicts, and their files."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pyarrow as pa
import pyarrow.parquet as pq

from verl.run.samples import METRIC_PREFIX
from verl.utils.files import replace_text, replacing
from verl.utils.portable import finite_or_null, valid_unicode

RESULT_FILE = "results.json"
SAMPLES_FILE = "samples.parquet"

PROMPT_TOO_LONG = "prompt_too_long"
"""The reason of samples that were not generated, because the model does not take so long a prompt: they are wrong."""

REASONS = ("correct", "wrong", "no_answer", "unparsed", "timeout", "memory", "crash", "error", PROMPT_TOO_LONG)
"""Why a sample got its verdict, in the order of tables."""

SAMPLE_COLUMNS = {
    "problem": pa.int64(),
    "sample": pa.int64(),
    "response": pa.large_string(),
    "num_tokens": pa.int64(),
    "truncated": pa.bool_(),
    "correct": pa.bool_(),
    "answer": pa.large_string(),
    "reason": pa.string(),
    "reward_extra_info": pa.large_string(),
    "conversation": pa.large_string(),
    "score": pa.float64(),
}
"""Columns of ``samples.parquet``. ``problem`` is the problem's index in the benchmark; ``sample`` counts from 0;
``reward_extra_info`` and ``conversation`` (who said what) are JSON, null if empty; ``score`` is a reward model's, null
without one."""


@dataclass(frozen=True)
class ScoredSample:
    """One response and its verdict."""

    response: str
    num_tokens: int
    truncated: bool
    """Cut at the length limit."""
    correct: bool
    answer: str
    """The answer that the verifier found in the response; empty if it found none."""
    reason: str
    """One of ``REASONS``."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Rank metrics of the response by name; not finite if undefined."""
    extras: Mapping[str, Any] = field(default_factory=dict)
    """Values that a user's reward function returned besides the score: JSON values by name."""
    conversation: Sequence[Mapping[str, str]] = ()
    """Who said what, if the response has several turns."""
    score: float | None = None
    """A reward model's; None where none read it."""


@dataclass(frozen=True)
class ProblemResult:
    """A problem and its samples. Problems may have different numbers of samples, or none."""

    index: int
    question: str
    answer: str
    samples: list[ScoredSample]


@dataclass(frozen=True)
class TaskResult:
    """One checkpoint on one benchmark at one temperature."""

    run: str
    """The run's alias."""
    step: int
    """Training step of the checkpoint; 0 is the base model."""
    benchmark: str
    temperature: float
    problems: list[ProblemResult]

    @property
    def label(self) -> str:
        """``alias@step``; :func:`row_labels` adds the temperature if results would share a label."""
        return valid_unicode(f"{self.run}@{self.step}")


def row_labels(results: Sequence[TaskResult]) -> list[str]:
    """Return a label for each result: ``alias@step``, with `` T=0.6`` if a benchmark has it at several temperatures."""
    counts = Counter((result.label, result.benchmark) for result in results)
    several = {label for (label, _), count in counts.items() if count > 1}
    return [f"{r.label} T={r.temperature:g}" if r.label in several else r.label for r in results]


def result_folder(folder: Path, run: str, step: int, benchmark: str, temperature: float) -> Path:
    """Return ``<folder>/<run>/step_<N>/<benchmark>/T<temperature>``; no name leads out of ``folder``."""
    return folder / safe_name(run) / f"step_{step}" / safe_name(benchmark) / f"T{temperature:g}"


def safe_name(name: str) -> str:
    """Return ``name`` as a file name, special characters as ``%2F`` and so on; different names stay different."""
    quoted = quote(name, safe=" @+=,()", errors="surrogatepass")
    return quoted.replace(".", "%2E") if quoted.strip(".") == "" else quoted


def write_result(folder: Path, result: TaskResult, figures: Mapping[str, Any]) -> Path:
    """Write ``results.json`` and ``samples.parquet`` of one result; return their folder.

    ``figures`` are its columns of ``results.csv``.

    Those that are not finite become null. Lone surrogates, which UTF-8 cannot represent, become U+FFFD.
    ``results.json`` is written last: if it exists, the result is complete.
    """
    target = result_folder(folder, result.run, result.step, result.benchmark, result.temperature)
    target.mkdir(parents=True, exist_ok=True)
    with replacing(target / SAMPLES_FILE) as temporary:
        pq.write_table(sample_table(result), temporary, compression="zstd")
    problems = [
        vars(problem) | {"samples": len(problem.samples), "correct": sum(s.correct for s in problem.samples)}
        for problem in result.problems
    ]
    place = {name: getattr(result, name) for name in ("run", "step", "benchmark", "temperature")}
    record = place | {"figures": finite_or_null(figures), "problems": problems}
    replace_text(target / RESULT_FILE, json.dumps(record, indent=1, allow_nan=False) + "\n")
    return target


def sample_table(result: TaskResult) -> pa.Table:
    """Return a row per sample. Every rank metric that some sample has is a column, null for samples without it."""
    names = metric_names(result.problems)
    schema = pa.schema([*SAMPLE_COLUMNS.items(), *((METRIC_PREFIX + name, pa.float64()) for name in names)])
    rows = [
        vars(sample)
        | {"problem": problem.index, "sample": i}
        | {"response": valid_unicode(sample.response), "answer": valid_unicode(sample.answer)}
        | {"reward_extra_info": json.dumps(finite_or_null(sample.extras)) if sample.extras else None}
        | {"conversation": _json_text(sample.conversation) if sample.conversation else None}
        | {METRIC_PREFIX + name: value for name, value in sample.metrics.items()}
        for problem in result.problems
        for i, sample in enumerate(problem.samples)
    ]
    return pa.Table.from_pylist(rows, schema=schema)


def _json_text(values: Any) -> str:
    return valid_unicode(json.dumps(values, ensure_ascii=False))


def metric_names(problems: Iterable[ProblemResult]) -> list[str]:
    """Return the names of the rank metrics, in order of first appearance."""
    return list(dict.fromkeys(name for p in problems for sample in p.samples for name in sample.metrics))
