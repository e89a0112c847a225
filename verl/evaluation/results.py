"""What an evaluation found: the samples of a run on a benchmark with their verdicts, and their files."""

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pyarrow as pa
import pyarrow.parquet as pq

RESULT_FILE = "results.json"
SAMPLES_FILE = "samples.parquet"

REASONS = ("correct", "wrong", "no_answer", "unparsed", "timeout", "memory", "crash")
"""Why a sample got its verdict, in the order of tables."""

METRIC_PREFIX = "metric/"
"""Before the names of rank metrics among the columns of ``samples.parquet``."""

SAMPLE_COLUMNS = {
    "problem": pa.int64(),
    "sample": pa.int64(),
    "response": pa.large_string(),
    "num_tokens": pa.int64(),
    "truncated": pa.bool_(),
    "correct": pa.bool_(),
    "answer": pa.large_string(),
    "reason": pa.string(),
}
"""``problem`` is the problem's index in the benchmark, ``sample`` counts from 0."""


@dataclass(frozen=True)
class Sample:
    """One response and its verdict."""

    response: str
    num_tokens: int
    truncated: bool
    """Cut at the length limit."""
    correct: bool
    answer: str
    """The answer that the verifier found in the response; empty where there is none."""
    reason: str
    """One of ``REASONS``."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Rank metrics of the response by name; not finite where undefined."""


@dataclass(frozen=True)
class EvaluatedProblem:
    """A problem and its samples; how many may differ between problems, and be none."""

    index: int
    question: str
    answer: str
    samples: list[Sample]


@dataclass(frozen=True)
class RunResult:
    """One checkpoint on one benchmark at one temperature."""

    run: str
    """The run's alias."""
    step: int
    """Training step of the checkpoint; 0 is the base model."""
    benchmark: str
    temperature: float
    problems: list[EvaluatedProblem]

    @property
    def label(self) -> str:
        """``alias@step``; :func:`row_labels` adds the temperature where that does not tell results apart."""
        return f"{self.run}@{self.step}"


def row_labels(results: Sequence[RunResult]) -> list[str]:
    """A label for each result: ``alias@step``, and `` T=0.6`` where that checkpoint met a benchmark more than once.

    Raises:
        ValueError: two results of one checkpoint, benchmark and temperature.
    """
    seen: dict[tuple[str, int, str], set[float]] = {}
    for result in results:
        temperatures = seen.setdefault((result.run, result.step, result.benchmark), set())
        if result.temperature in temperatures:
            raise ValueError(
                f"results: {result.label} has two results on {result.benchmark} at temperature {result.temperature:g}"
            )
        temperatures.add(result.temperature)
    several = {(run, step) for (run, step, _), temperatures in seen.items() if len(temperatures) > 1}
    return [
        f"{result.label} T={result.temperature:g}" if (result.run, result.step) in several else result.label
        for result in results
    ]


def result_folder(folder: Path, run: str, step: int, benchmark: str, temperature: float) -> Path:
    """``<folder>/<run>/step_<N>/<benchmark>/T<temperature>``; no name leads out of ``folder``."""
    return folder / safe_name(run) / f"step_{step}" / safe_name(benchmark) / f"T{temperature:g}"


def safe_name(name: str) -> str:
    """``name`` as the name of one file, different for different names: what a path could misread becomes ``%2F``..."""
    quoted = quote(name, safe=" @+=,()", errors="surrogatepass")
    return quoted.replace(".", "%2E") if quoted.strip(".") == "" else quoted


def write_result(folder: Path, result: RunResult, figures: Mapping[str, Any] | None = None) -> Path:
    """Write ``results.json`` and ``samples.parquet`` of one result below ``folder``, and return their folder.

    ``figures`` are kept in the JSON for whoever reads it; figures that are not finite become null. Lone surrogates,
    which no UTF-8 file can hold, become U+FFFD. ``results.json`` comes last, so where it stands the result is whole.
    """
    target = result_folder(folder, result.run, result.step, result.benchmark, result.temperature)
    target.mkdir(parents=True, exist_ok=True)
    table = sample_table(result)
    with replacing(target / SAMPLES_FILE) as temporary:
        pq.write_table(table, temporary, compression="zstd")
    record = {
        "run": result.run,
        "step": result.step,
        "benchmark": result.benchmark,
        "temperature": result.temperature,
        "figures": finite_or_null(figures or {}),
        "problems": [
            {
                "index": problem.index,
                "question": problem.question,
                "answer": problem.answer,
                "samples": len(problem.samples),
                "correct": sum(sample.correct for sample in problem.samples),
            }
            for problem in result.problems
        ],
    }
    write_text(target / RESULT_FILE, json.dumps(record, indent=1, allow_nan=False) + "\n")
    return target


def sample_table(result: RunResult) -> pa.Table:
    """One row per sample; each rank metric that any sample has is a column, null where a sample lacks it."""
    rows = [(p.index, i, sample) for p in result.problems for i, sample in enumerate(p.samples)]
    columns: dict[str, list[Any]] = {
        "problem": [index for index, _, _ in rows],
        "sample": [i for _, i, _ in rows],
    }
    for name in list(SAMPLE_COLUMNS)[2:]:
        values = [getattr(sample, name) for _, _, sample in rows]
        columns[name] = [valid_unicode(value) for value in values] if name in ("response", "answer") else values
    schema = dict(SAMPLE_COLUMNS)
    for name in metric_names(result.problems):
        schema[METRIC_PREFIX + name] = pa.float64()
        columns[METRIC_PREFIX + name] = [sample.metrics.get(name) for _, _, sample in rows]
    return pa.table(columns, schema=pa.schema(list(schema.items())))


def metric_names(problems: Iterable[EvaluatedProblem]) -> list[str]:
    """Names of the rank metrics, in the order in which samples bring them."""
    return list(dict.fromkeys(name for p in problems for sample in p.samples for name in sample.metrics))


def read_result(folder: Path) -> RunResult:
    """The result that :func:`write_result` wrote into ``folder``.

    Raises:
        FileNotFoundError: no result, or no whole one.
    """
    record = json.loads((folder / RESULT_FILE).read_text(encoding="utf-8"))
    table = pq.read_table(folder / SAMPLES_FILE)
    metrics = [name for name in table.column_names if name.startswith(METRIC_PREFIX)]
    samples: dict[int, list[Sample]] = {}
    for row in table.to_pylist():
        found = {name.removeprefix(METRIC_PREFIX): row[name] for name in metrics if row[name] is not None}
        values = {name: row[name] for name in list(SAMPLE_COLUMNS)[2:]}
        samples.setdefault(row["problem"], []).append(Sample(**values, metrics=found))
    problems = [
        EvaluatedProblem(p["index"], p["question"], p["answer"], samples.get(p["index"], []))
        for p in record["problems"]
    ]
    return RunResult(record["run"], record["step"], record["benchmark"], record["temperature"], problems)


def valid_unicode(text: str) -> str:
    """``text`` with lone surrogates replaced by U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def finite_or_null(value: Any) -> Any:
    """``value`` with every float that is not finite replaced by None, so that it is JSON."""
    if isinstance(value, Mapping):
        return {str(key): finite_or_null(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite_or_null(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path beside ``path`` that takes its place at the end, unless an error ends it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write ``text`` in one piece: a reader sees the old file or the new one."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="")
