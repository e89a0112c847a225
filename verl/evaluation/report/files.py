"""Everything that an evaluation leaves behind: files per result, tables, plots and the page."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from verl.evaluation.report.page import MAX_PAGE_BYTES, build_page
from verl.evaluation.report.plots import write_plots
from verl.evaluation.report.tables import csv_text, markdown
from verl.evaluation.results import RunResult, row_labels, write_result, write_text
from verl.evaluation.statistics.summary import Row, Summary, summarise


def write_results(
    folder: Path,
    results: Sequence[RunResult],
    title: str = "Evaluation",
    compare_to: str = "auto",
    seed: int = 0,
    max_page_bytes: int = MAX_PAGE_BYTES,
) -> Summary:
    """Write all results below ``folder`` and return their figures.

    ``<run>/step_<N>/<benchmark>/T<temperature>/results.json`` and ``samples.parquet`` for each result, ``results.md``,
    ``results.csv``, ``plots/*.svg`` and ``*.png``, and ``index.html``. The same results give the same files.

    Args:
        folder: made if missing.
        results: in the order of the tables; may be empty.
        title: of the tables and the page.
        compare_to: as in :func:`verl.evaluation.statistics.summary.summarise`.
        seed: of the bootstrap.
        max_page_bytes: size of ``index.html``; responses are shortened to keep it.

    Raises:
        ValueError: two results of one checkpoint, benchmark and temperature; unknown ``compare_to``.
    """
    summary = summarise(results, compare_to, seed)
    folder.mkdir(parents=True, exist_ok=True)
    rows = {(row.label, row.benchmark): row for row in summary.rows}
    for result, label in zip(results, row_labels(results), strict=True):
        write_result(folder, result, figures(rows[label, result.benchmark]))
    write_text(folder / "results.md", markdown(summary, title))
    write_text(folder / "results.csv", csv_text(summary))
    write_plots(folder / "plots", summary)
    write_text(folder / "index.html", build_page(summary, results, title, max_page_bytes))
    return summary


def figures(row: Row) -> dict[str, Any]:
    """The figures of a row as they stand in ``results.json``."""
    return {name: value for name, value in asdict(row).items() if name not in ("label", "benchmark")}
