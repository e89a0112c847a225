"""Builds the analysis page, a self-contained HTML file with figures and correlations but without scripts."""

import base64
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from verl_pages.html import render
from verl_pages.names import metric_name

COEFFICIENTS = {
    "pearson": "Pearson",
    "spearman": "Spearman",
    "pearson_partial": "Pearson, length fixed",
    "spearman_partial": "Spearman, length fixed",
}


def build_page(
    title: str, lines: Sequence[str], folder: Path, figures: Sequence[tuple[str, str]], table: pd.DataFrame
) -> str:
    """Return the page's HTML. ``figures`` are pairs of an SVG file's name in ``folder`` and its caption."""
    pictures = [(n, text, base64.b64encode((folder / f"{n}.svg").read_bytes()).decode()) for n, text in figures]
    return render(
        "analysis.html",
        title,
        ("base", "analysis"),
        links=[("figures", "Figures"), ("correlations", "Correlations")],
        lines=lines,
        figures=pictures,
        coefficients=COEFFICIENTS.values(),
        tables=list(_tables(table)) if len(table) else [],
    )


def _tables(table: pd.DataFrame) -> Iterator[tuple[str, list[tuple[Any, ...]]]]:
    """Yield the table's title and rows for each model and benchmark. A row is a tuple (labels, count, cells)."""
    model = ["run", "step", "benchmark", "temperature", "of"]
    for (run, step, benchmark, temperature, rows_of), part in table.groupby(model, sort=False):
        rows = [
            (
                [metric_name(row["x"]), metric_name(row["y"]), row["responses"]],
                row["count"],
                [_cell(row, name) for name in COEFFICIENTS],
            )
            for _, row in part.iterrows()
        ]
        yield f"{run}@{step} on {benchmark}, T={temperature:g}: a {rows_of} each", rows


def _cell(row: "pd.Series[Any]", name: str) -> tuple[str, str, bool]:
    """Return a coefficient and its interval as text, and whether the interval contains 0."""
    value, low, high = (float(row[name + end]) for end in ("", "_low", "_high"))
    if not math.isfinite(value):
        return "–", "", True
    interval = f"[{low:.2f}, {high:.2f}]" if math.isfinite(low) else ""
    return f"{value:.2f}", interval, low <= 0 <= high
