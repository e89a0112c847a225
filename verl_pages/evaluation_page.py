"""The page of an evaluation: tables, curves and every response."""

from collections.abc import Mapping, Sequence
from typing import Any

from verl.evaluation.report.plots import MARKERS, label_styles
from verl.evaluation.report.tables import DEFINITIONS, LEGEND, baseline_sentence
from verl.evaluation.results import TaskResult, metric_names
from verl.evaluation.statistics.bootstrap import Estimate
from verl.evaluation.statistics.responses import GROUPS
from verl.evaluation.statistics.summary import Summary, SummaryRow
from verl.utils.portable import printable
from verl_pages.colours import SHAPES, lighter
from verl_pages.evaluation_responses import (
    MAX_TEXT,
    OTHER_VERDICT,
    VERDICT_CODES,
    BenchmarkSamples,
    fit_responses,
    verdict_code,
)
from verl_pages.html import SHARED, PageAssets, ascii_json, pack, read_assets

MAX_PAGE_BYTES = 64 << 20
"""Responses are shortened and, if need be, left out to keep the page within this size. Figures, verdicts and questions
stay."""

AVERAGE_PLACE = -1
"""Stands for a benchmark's number in rows of averages; data.js calls it AVERAGE."""


def page_assets() -> PageAssets:
    """The page before its data."""
    own = [f"evaluation_{name}.js" for name in ("data", "tables", "curves", "browser", "start")]
    return PageAssets(
        read_assets(SHARED, "evaluation_body.html"),
        read_assets(SHARED, "base.css", "evaluation_page.css"),
        read_assets(SHARED, "base.js", "list.js", *own),
    )


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
    index, assets = _index(summary, benchmarks, metrics), page_assets()
    room = max_bytes - len(assets.fill(title, index, chunks)) - 4096
    limits, places, responses = fit_responses(benchmarks, metrics, len(chunks), room)
    for entry, of_benchmark in zip(index["benchmarks"], places, strict=True):
        entry["chunks"] = of_benchmark
    index["limits"] = limits.sentence() if benchmarks else ""
    return assets.fill(title, index, chunks + responses)


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
