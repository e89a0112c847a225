"""One HTML page with tables, curves and every response, which loads nothing from anywhere.

What models and benchmarks wrote is hostile. It stands in the file only as ASCII JSON without ``<``, ``>`` and ``&``, or
compressed and in base64; the script puts it into the document as text nodes; and the page's own policy forbids every
script but that one and every connection.
"""

import base64
import hashlib
import html
import json
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from verl.evaluation.report.plots import MARKERS, label_styles, lighter
from verl.evaluation.report.tables import DEFINITIONS, LEGEND, baseline_sentence, printable
from verl.evaluation.results import (
    EvaluatedProblem,
    RunResult,
    Sample,
    finite_or_null,
    metric_names,
    row_labels,
)
from verl.evaluation.statistics.pass_at_k import Estimate
from verl.evaluation.statistics.summary import GROUPS, Row, Summary

MAX_PAGE_BYTES = 64 << 20
"""Responses are shortened and, last, left out until the page is no larger. Figures, verdicts and questions stay."""

MAX_TEXT = 20_000
"""Characters of a question or an answer that are shown."""

CHUNK_BYTES = 1 << 19
"""Uncompressed size at which a chunk of responses is closed; each is unpacked when one of its problems is opened."""

PROBED = 64
"""Problems whose responses are compressed to foresee how small all become."""

SLACK = 1.1
"""What is foreseen to be larger than this many times the room is not even tried."""

VERDICT_CODES = {
    "correct": "c",
    "wrong": "w",
    "no_answer": "n",
    "unparsed": "u",
    "timeout": "t",
    "memory": "m",
    "crash": "x",
}
OTHER_VERDICT = "o"

AVERAGE_PLACE = -1
"""In place of a benchmark's number; data.js calls it AVERAGE."""

SHAPES = ("circle", "square", "diamond", "triangle")
SCRIPTS = ("data.js", "tables.js", "curves.js", "browser.js", "start.js")


@dataclass(frozen=True)
class Limits:
    """How much of the responses a page shows."""

    characters: int
    """Longer responses lose their middle."""
    samples: int | None
    """Responses per problem; None: all."""

    @property
    def head(self) -> int:
        """Characters kept before the gap; the rest, where answers stand, after it."""
        return self.characters // 2

    def sentence(self) -> str:
        """What a reader must know of it."""
        parts = [f"Of responses longer than {self.characters:,} characters this page shows the beginning and the end."]
        if self.samples == 0:
            parts = ["To keep the page small, responses are left out."]
        elif self.samples is not None:
            parts.append(f"To keep it small, it has at most {self.samples} responses per problem and run.")
        return " ".join([*parts, "samples.parquet has them whole; all verdicts are here."])


NOTHING = Limits(0, 0)

LIMITS = (
    *(Limits(characters, None) for characters in (20_000, 8_000, 3_000)),
    *(
        Limits(characters, samples)
        for characters, samples in ((3_000, 128), (3_000, 64), (3_000, 32), (3_000, 16), (1_500, 4), (800, 1))
    ),
)
"""Tried in this order until the page is small enough; then ``NOTHING`` is left."""


def build_page(
    summary: Summary, results: Sequence[RunResult], title: str = "Evaluation", max_bytes: int = MAX_PAGE_BYTES
) -> str:
    """The page's text; what was evaluated stands in it as ASCII.

    Args:
        summary: of ``results``.
        results: as they were summarised.
        title: of the page.
        max_bytes: its size, unless figures, verdicts and questions alone are larger.
    """
    benchmarks = [_Benchmark.gather(name, results, summary.labels) for name in summary.benchmarks]
    metrics = list(dict.fromkeys(name for result in results for name in metric_names(result.problems)))
    chunks = [_pack([[p.index, p.question[:MAX_TEXT], p.answer[:MAX_TEXT]] for p in b.problems]) for b in benchmarks]
    index = _index(summary, benchmarks, metrics)
    room = max_bytes - len(_fill(title, index, chunks)) - 4096
    limits, places, responses = _fitting_responses(benchmarks, metrics, len(chunks), room)
    for entry, of_benchmark in zip(index["benchmarks"], places, strict=True):
        entry["chunks"] = of_benchmark
    index["limits"] = limits.sentence() if benchmarks else ""
    return _fill(title, index, chunks + responses)


@dataclass(frozen=True)
class _Benchmark:
    """The problems of a benchmark over all runs, and what each run has of them."""

    name: str
    problems: list[EvaluatedProblem]
    """One per problem; its samples are those of whichever run named it first."""
    samples: list[list[list[Sample]] | None]
    """``[label][problem]``; None for a run without this benchmark."""

    @classmethod
    def gather(cls, name: str, results: Sequence[RunResult], labels: Sequence[str]) -> "_Benchmark":
        mine = {
            label: result.problems
            for label, result in zip(row_labels(results), results, strict=True)
            if result.benchmark == name
        }
        # Runs may have been evaluated on different versions of a benchmark: only the same text is the same problem.
        problems = {(p.index, p.question): p for run in mine.values() for p in run}
        order = sorted(problems, key=lambda key: key[0])
        samples: list[list[list[Sample]] | None] = []
        for label in labels:
            found = {(p.index, p.question): p.samples for p in mine.get(label, [])}
            samples.append([found.get(key, []) for key in order] if label in mine else None)
        return cls(name, [problems[key] for key in order], samples)


def _index(summary: Summary, benchmarks: Sequence[_Benchmark], metrics: Sequence[str]) -> dict[str, Any]:
    """All that the page shows before a problem is opened."""
    styles = label_styles(summary.labels)
    names = [*VERDICT_CODES, *sorted({reason for row in summary.rows for reason in row.reasons} - VERDICT_CODES.keys())]
    return {
        "labels": [
            {
                "name": printable(label),
                "light": styles[label]["color"],
                "dark": lighter(str(styles[label]["color"]), 0.3),
                "dashed": styles[label]["linestyle"] != "-",
                "shape": SHAPES[MARKERS.index(str(styles[label]["marker"])) % len(SHAPES)],
            }
            for label in summary.labels
        ],
        "benchmarks": [
            {
                "name": printable(benchmark.name),
                "count": len(benchmark.problems),
                "questions": place,
                "verdicts": [run and ["".join(map(_code, samples)) for samples in run] for run in benchmark.samples],
            }
            for place, benchmark in enumerate(benchmarks)
        ],
        "rows": [_row(row, summary, summary.benchmarks.index(row.benchmark)) for row in summary.rows]
        + [_row(row, summary, AVERAGE_PLACE) for row in summary.averages],
        "verdicts": [[VERDICT_CODES.get(name, OTHER_VERDICT), name] for name in names],
        "metrics": list(metrics),
        "legend": [text for text in (LEGEND, printable(baseline_sentence(summary)), DEFINITIONS) if text],
    }


def _row(row: Row, summary: Summary, benchmark: int) -> dict[str, Any]:
    return {
        "label": summary.labels.index(row.label),
        "benchmark": benchmark,
        "problems": row.num_problems,
        "missing": row.num_missing,
        "samples": row.samples,
        "pass": _estimates(row.pass_at_k),
        "maj": _estimates(row.maj_at_k),
        "differences": [
            [k, d.estimate.value, d.estimate.low, d.estimate.high, d.outside_noise] for k, d in row.differences.items()
        ],
        "tokens": row.mean_tokens,
        "truncated": row.truncation_rate,
        "repetition": row.repetition_rate,
        "reasons": dict(row.reasons),
        "metrics": {name: [groups[group].mean for group in GROUPS] for name, groups in row.metrics.items()},
    }


def _estimates(estimates: Mapping[int, Estimate]) -> list[list[float]]:
    return [[k, e.value, e.low, e.high] for k, e in estimates.items()]


def _code(sample: Sample) -> str:
    return "c" if sample.correct else VERDICT_CODES.get(sample.reason, OTHER_VERDICT)


def _fitting_responses(
    benchmarks: Sequence[_Benchmark], metrics: Sequence[str], first: int, room: int
) -> tuple[Limits, list[Any], list[str]]:
    """The widest limits within which the responses fit into ``room`` bytes, and :func:`_pack_responses` within them."""
    ratio = _packed_ratio(benchmarks)
    for limits in LIMITS:
        if ratio * _text_size(benchmarks, limits) <= SLACK * room:
            packed = _pack_responses(benchmarks, metrics, limits, first, room)
            if packed is not None:
                return limits, *packed
    return NOTHING, [[[] for _ in benchmark.samples] for benchmark in benchmarks], []


def _pack_responses(
    benchmarks: Sequence[_Benchmark], metrics: Sequence[str], limits: Limits, first: int, room: int
) -> tuple[list[Any], list[str]] | None:
    """Chunks of responses, and for each benchmark and label ``[first problem, end, chunk]``; None where they are too
    large. Chunks are numbered from ``first``."""
    chunks: list[str] = []
    places: list[Any] = [[[] for _ in benchmark.samples] for benchmark in benchmarks]
    for benchmark, of_benchmark in zip(benchmarks, places, strict=True):
        for run, of_run in zip(benchmark.samples, of_benchmark, strict=True):
            for start, end, text in _chunks(run or [], metrics, limits):
                of_run.append([start, end, first + len(chunks)])
                chunks.append(_pack_text(text))
                room -= len(chunks[-1]) + 80
                if room < 0:
                    return None
    return places, chunks


def _packed_ratio(benchmarks: Sequence[_Benchmark]) -> float:
    """Bytes of the page per character of a response, from responses of all benchmarks and runs."""
    runs = [run for benchmark in benchmarks for run in benchmark.samples if run]
    everything = [samples for run in runs for samples in run]
    probed = everything[:: max(1, len(everything) // PROBED)]
    text = _json([[sample.response[: LIMITS[0].characters] for sample in samples[:4]] for samples in probed])
    return len(_pack_text(text)) / len(text)


def _text_size(benchmarks: Sequence[_Benchmark], limits: Limits) -> int:
    """Characters of all responses within ``limits``."""
    return sum(
        min(len(samples[i].response), limits.characters)
        for benchmark in benchmarks
        for run in benchmark.samples
        for samples in run or []
        for i in _kept(samples, limits)
    )


def _chunks(run: Sequence[Sequence[Sample]], metrics: Sequence[str], limits: Limits) -> Iterator[tuple[int, int, str]]:
    """First problem, end and JSON of each chunk of a run's responses."""
    start, size, parts = 0, 0, []
    for i, samples in enumerate(run):
        parts.append(_json(_problem_record(samples, metrics, limits)))
        size += len(parts[-1])
        if size >= CHUNK_BYTES or i == len(run) - 1:
            yield start, i + 1, f"[{','.join(parts)}]"
            start, size, parts = i + 1, 0, []


def _problem_record(samples: Sequence[Sample], metrics: Sequence[str], limits: Limits) -> list[Any]:
    """One entry per sample, null where it is left out; a shortened response is two texts.

    The order of fields is that of ``sampleView`` in browser.js.
    """
    record: list[Any] = [None] * len(samples)
    for i in _kept(samples, limits):
        sample = samples[i]
        text: str | list[str] = sample.response
        left_out = max(0, len(text) - limits.characters)
        if left_out:
            text = [sample.response[: limits.head], sample.response[limits.head + left_out :]]
        figures = [sample.metrics.get(name) for name in metrics] if sample.metrics else None
        answer = sample.answer[:MAX_TEXT]
        record[i] = [text, sample.num_tokens, int(sample.truncated), answer, left_out, figures]
    return record


def _kept(samples: Sequence[Sample], limits: Limits) -> list[int]:
    """The samples that are shown: where not all, the first of each verdict and then the others in their order."""
    if limits.samples is None or len(samples) <= limits.samples:
        return list(range(len(samples)))
    first_of_verdict: dict[str, int] = {}
    for i, sample in enumerate(samples):
        first_of_verdict.setdefault(_code(sample), i)
    leading = list(first_of_verdict.values())
    return (leading + [i for i in range(len(samples)) if i not in leading])[: limits.samples]


def _json(value: Any) -> str:
    """ASCII JSON that cannot end a script element: no ``<``, ``>`` or ``&``; what is not finite is null."""
    text = json.dumps(finite_or_null(value), ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _pack(value: Any) -> str:
    return _pack_text(_json(value))


def _pack_text(text: str) -> str:
    return base64.b64encode(zlib.compress(text.encode("ascii"), 6)).decode("ascii")


def _fill(title: str, index: Mapping[str, Any], chunks: Sequence[str]) -> str:
    """The page with its parts in their places; what is filled in is not searched for places again."""
    style, script = _asset("page.css"), '"use strict";\n(() => {\n' + "\n".join(map(_asset, SCRIPTS)) + "\n})();\n"
    parts = {
        "policy": f"default-src 'none'; script-src {_digest(script)}; style-src {_digest(style)}; base-uri 'none'; "
        "form-action 'none'",
        "title": html.escape(printable(title)).encode("ascii", "xmlcharrefreplace").decode("ascii"),
        "style": style,
        "script": script,
        "data": _json(index),
        "chunks": "\n".join(
            f'<script type="text/plain" id="chunk-{i}">{chunk}</script>' for i, chunk in enumerate(chunks)
        ),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match.group(1)], _asset("page.html"))


def _digest(source: str) -> str:
    """The name by which a content security policy admits one inline element."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode('ascii')}'"


@cache
def _asset(name: str) -> str:
    return files("verl.evaluation.report").joinpath("assets", name).read_text(encoding="utf-8")
