"""One HTML page with tables, curves and every response, which loads nothing from elsewhere.

Text of models and benchmarks is hostile. The file contains it only as ASCII JSON without ``<``, ``>`` and ``&``, or
compressed and in base64; the script puts it into the document as text nodes; and the page's own policy forbids all
other scripts and all connections.
"""

import base64
import hashlib
import html
import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from verl.evaluation.report.page_responses import (
    MAX_TEXT,
    OTHER_VERDICT,
    VERDICT_CODES,
    BenchmarkSamples,
    ascii_json,
    fit_responses,
    pack,
    verdict_code,
)
from verl.evaluation.report.plots import MARKERS, label_styles, lighter
from verl.evaluation.report.tables import DEFINITIONS, LEGEND, baseline_sentence, printable
from verl.evaluation.results import TaskResult, metric_names
from verl.evaluation.statistics.bootstrap import Estimate
from verl.evaluation.statistics.responses import GROUPS
from verl.evaluation.statistics.summary import Summary, SummaryRow

MAX_PAGE_BYTES = 64 << 20
"""Responses are shortened and, if need be, left out to keep the page within this size. Figures, verdicts and questions
stay."""

AVERAGE_PLACE = -1
"""Stands for a benchmark's number in rows of averages; data.js calls it AVERAGE."""

SHAPES = ("circle", "square", "diamond", "triangle")
SCRIPTS = ("data.js", "tables.js", "curves.js", "browser.js", "start.js")


def build_page(
    summary: Summary, results: Sequence[TaskResult], title: str = "Evaluation", max_bytes: int = MAX_PAGE_BYTES
) -> str:
    """The text of the page; everything that was evaluated is ASCII.

    Args:
        summary: of ``results``.
        results: as they were summarised.
        title: of the page.
        max_bytes: its size, unless figures, verdicts and questions alone are larger.
    """
    benchmarks = [BenchmarkSamples.gather(name, results, summary.labels) for name in summary.benchmarks]
    metrics = metric_names(problem for result in results for problem in result.problems)
    chunks = [
        pack(ascii_json([[p.index, p.question[:MAX_TEXT], p.answer[:MAX_TEXT]] for p in benchmark.problems]))
        for benchmark in benchmarks
    ]
    index = _index(summary, benchmarks, metrics)
    room = max_bytes - len(_fill(title, index, chunks)) - 4096
    limits, places, responses = fit_responses(benchmarks, metrics, len(chunks), room)
    for entry, of_benchmark in zip(index["benchmarks"], places, strict=True):
        entry["chunks"] = of_benchmark
    index["limits"] = limits.sentence() if benchmarks else ""
    return _fill(title, index, chunks + responses)


def _index(summary: Summary, benchmarks: Sequence[BenchmarkSamples], metrics: Sequence[str]) -> dict[str, Any]:
    """Everything that the page shows before a problem is opened."""
    styles = label_styles(summary.labels)
    names = [*VERDICT_CODES, *sorted(set(summary.reasons()) - VERDICT_CODES.keys())]
    return {
        "labels": [
            {
                "name": printable(label),
                "light": styles[label]["color"],
                "dark": lighter(styles[label]["color"], 0.3),
                "dashed": styles[label]["linestyle"] != "-",
                "shape": SHAPES[MARKERS.index(styles[label]["marker"]) % len(SHAPES)],
            }
            for label in summary.labels
        ],
        "benchmarks": [
            {
                "name": printable(benchmark.name),
                "count": len(benchmark.problems),
                "questions": place,
                "verdicts": [
                    run and ["".join(map(verdict_code, samples)) for samples in run] for run in benchmark.samples
                ],
            }
            for place, benchmark in enumerate(benchmarks)
        ],
        "rows": [_row(row, summary, summary.benchmarks.index(row.benchmark)) for row in summary.rows]
        + [_row(row, summary, AVERAGE_PLACE) for row in summary.averages],
        "verdicts": [[VERDICT_CODES.get(name, OTHER_VERDICT), name] for name in names],
        "metrics": list(metrics),
        "legend": [text for text in (LEGEND, printable(baseline_sentence(summary)), DEFINITIONS) if text],
    }


def _row(row: SummaryRow, summary: Summary, benchmark: int) -> dict[str, Any]:
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


def _fill(title: str, index: Mapping[str, Any], chunks: Sequence[str]) -> str:
    """The page with its parts filled in; placeholders inside a part are left alone."""
    style, script = _asset("page.css"), '"use strict";\n(() => {\n' + "\n".join(map(_asset, SCRIPTS)) + "\n})();\n"
    parts = {
        "policy": f"default-src 'none'; script-src {_digest(script)}; style-src {_digest(style)}; base-uri 'none'; "
        "form-action 'none'",
        "title": html.escape(printable(title)).encode("ascii", "xmlcharrefreplace").decode("ascii"),
        "style": style,
        "script": script,
        "data": ascii_json(index),
        "chunks": "\n".join(
            f'<script type="text/plain" id="chunk-{i}">{chunk}</script>' for i, chunk in enumerate(chunks)
        ),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match.group(1)], _asset("page.html"))


def _digest(source: str) -> str:
    """The name by which a content security policy allows one inline element."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode('ascii')}'"


@cache
def _asset(name: str) -> str:
    return files("verl.evaluation.report").joinpath("assets", name).read_text(encoding="utf-8")
