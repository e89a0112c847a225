"""Evaluation results and their output files. A result consists of a checkpoint's scored samples on a benchmark."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pyarrow as pa
import pyarrow.parquet as pq

from verl.utils.files import replace_text, replacing
from verl.utils.portable import finite_or_null, valid_unicode
from verl_pages.sample_files import METRIC_PREFIX

RESULT_FILE = "results.json"
SAMPLES_FILE = "samples.parquet"

ENVIRONMENT = "environment/"
"""Prefix of columns and statistics for conversations: ``environment/reward``, ``environment/turns``, and counts."""

PROMPT_TOO_LONG = "prompt_too_long"
"""Reason code for samples that were not generated because the prompt is too long for the model. They count as wrong."""

REASONS = ("correct", "wrong", "no_answer", "unparsed", "timeout", "memory", "crash", "error", PROMPT_TOO_LONG)
"""Reason codes for verdicts, in the order used in tables."""

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
"""Columns of ``samples.parquet``. ``problem`` is the problem's index in the benchmark, and ``sample`` counts from 0.
``reward_extra_info`` and ``conversation`` (the messages by role) are JSON, or null if empty. ``score`` is the reward
model's score, or null without a reward model."""


@dataclass(frozen=True)
class ScoredSample:
    """One response and its verdict."""

    response: str
    num_tokens: int
    truncated: bool
    """Whether the response was cut off at the length limit."""
    correct: bool
    answer: str
    """Answer that the verifier extracted from the response, or an empty string if there is none."""
    reason: str
    """Reason code from ``REASONS``."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Rank metrics of the response, keyed by name. Undefined metrics are not finite."""
    extras: Mapping[str, Any] = field(default_factory=dict)
    """Additional JSON values from a custom reward function, keyed by name."""
    conversation: Sequence[Mapping[str, str]] = ()
    """Messages with their roles if the response has several turns; otherwise empty."""
    environment: Mapping[str, float] = field(default_factory=dict)
    """Sum of the environment's rewards, number of turns, and other counts, keyed by name. Empty for a single turn."""
    score: float | None = None
    """Reward model score, or None if no reward model was used."""


@dataclass(frozen=True)
class ProblemResult:
    """A problem and its samples. The number of samples varies between problems and can be 0."""

    index: int
    question: str
    answer: str
    samples: list[ScoredSample]


@dataclass(frozen=True)
class TaskResult:
    """Result of one checkpoint on one benchmark at one temperature."""

    run: str
    """Alias of the run."""
    step: int
    """Training step of the checkpoint, or 0 for the base model."""
    benchmark: str
    temperature: float
    problems: list[ProblemResult]

    @property
    def label(self) -> str:
        """Label ``alias@step``; :func:`row_labels` adds the temperature if labels would otherwise be ambiguous."""
        return valid_unicode(f"{self.run}@{self.step}")


def row_labels(results: Sequence[TaskResult]) -> list[str]:
    """Label each result ``alias@step``, plus `` T=0.6`` if a benchmark was evaluated at several temperatures."""
    counts = Counter((result.label, result.benchmark) for result in results)
    several = {label for (label, _), count in counts.items() if count > 1}
    return [f"{r.label} T={r.temperature:g}" if r.label in several else r.label for r in results]


def result_folder(folder: Path, run: str, step: int, benchmark: str, temperature: float) -> Path:
    """Return ``<folder>/<run>/step_<N>/<benchmark>/T<temperature>``. Names cannot escape ``folder``."""
    return folder / safe_name(run) / f"step_{step}" / safe_name(benchmark) / f"T{temperature:g}"


def safe_name(name: str) -> str:
    """Percent-encode special characters so that ``name`` becomes a valid file name. Distinct names stay distinct."""
    quoted = quote(name, safe=" @+=,()", errors="surrogatepass")
    return quoted.replace(".", "%2E") if quoted.strip(".") == "" else quoted


def write_result(folder: Path, result: TaskResult, figures: Mapping[str, Any]) -> Path:
    """Write ``results.json`` and ``samples.parquet`` of one result and return their folder.

    ``figures`` contains the result's columns of ``results.csv``. Values that are not finite become null. Lone
    surrogates, which UTF-8 cannot represent, become U+FFFD. ``results.json`` is written last, so its presence marks a
    complete result.
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
    """Return a table with one row per sample. Columns of rank metrics are null for samples without the metric."""
    samples = [sample for problem in result.problems for sample in problem.samples]
    columns = [f"{ENVIRONMENT}{name}" for sample in samples for name in sample.environment]
    columns += [f"{METRIC_PREFIX}{name}" for sample in samples for name in sample.metrics]
    schema = pa.schema([*SAMPLE_COLUMNS.items(), *((name, pa.float64()) for name in dict.fromkeys(columns))])
    rows = [
        vars(sample)
        | {"problem": problem.index, "sample": i}
        | {"response": valid_unicode(sample.response), "answer": valid_unicode(sample.answer)}
        | {"reward_extra_info": json.dumps(finite_or_null(sample.extras)) if sample.extras else None}
        | {"conversation": _json_text(sample.conversation) if sample.conversation else None}
        | {f"{ENVIRONMENT}{name}": value for name, value in sample.environment.items()}
        | {METRIC_PREFIX + name: value for name, value in sample.metrics.items()}
        for problem in result.problems
        for i, sample in enumerate(problem.samples)
    ]
    return pa.Table.from_pylist(rows, schema=schema)


def _json_text(values: Any) -> str:
    return valid_unicode(json.dumps(values, ensure_ascii=False))
