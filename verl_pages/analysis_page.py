"""The page of an analysis: figures and correlations in one HTML file that loads nothing and runs no script."""

import base64
import hashlib
import html
import math
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from verl_pages.html import SHARED, read_assets

OWN_STYLE = """
figure { margin: 1rem 0 1.6rem; }
figure div { overflow-x: auto; background: #fff; border: 1px solid var(--line); border-radius: 8px; padding: .5rem; }
img { display: block; max-width: none; }
td.n { white-space: nowrap; }
td.zero { color: var(--quiet); }
@media print {
  .top { display: block; position: static; } .top nav { display: none; }
  .scroll { overflow: visible; max-height: none; } thead th { position: static; }
  figure, tr { break-inside: avoid; } img { max-width: 100%; height: auto; }
}
"""

STYLE = read_assets(SHARED, "base.css") + OWN_STYLE
"""That of all pages; figures are drawn on white."""

COEFFICIENTS = {
    "pearson": "Pearson",
    "spearman": "Spearman",
    "pearson_partial": "Pearson, length fixed",
    "spearman_partial": "Spearman, length fixed",
}

TEXTS = ("x", "y", "responses")
"""Columns of text."""

MODEL = ["run", "step", "benchmark", "temperature"]


def build_page(
    title: str, lines: Sequence[str], folder: Path, figures: Sequence[tuple[str, str]], table: pd.DataFrame
) -> str:
    """The text of the page.

    Args:
        lines: sentences below the title.
        folder: of the figures' SVG files.
        figures: file name and caption of each.
        table: the correlations.
    """
    digest = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; base-uri 'none'; form-action 'none'"
    drawn = "\n".join(_figure(folder / f"{name}.svg", caption) for name, caption in figures)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(title)}</title>
<style>{STYLE}</style>
</head>
<body>
<header class="top"><div class="bar"><h1>{html.escape(title)}</h1>
<nav><a href="#figures">Figures</a><a href="#correlations">Correlations</a></nav></div></header>
<main>
{"".join(f'<p class="quiet">{html.escape(line)}</p>' for line in lines)}
<section id="figures"><h2>Figures</h2>
{drawn}
</section>
<section id="correlations"><h2>Correlations</h2>
<p class="quiet">Below each coefficient is its 95% interval, from a bootstrap over prompts; grey where it holds 0.
Length fixed: partial correlations given the length of responses.</p>
{_tables(table)}
</section>
</main>
</body>
</html>
"""


def _figure(path: Path, caption: str) -> str:
    name = html.escape(path.stem)
    data = base64.b64encode(path.read_bytes()).decode()
    image = f'<img alt="{name}" src="data:image/svg+xml;base64,{data}">'
    # Wide figures are scrolled, by the keyboard too.
    scrolled = f'<div tabindex="0" role="group" aria-label="{name}">{image}</div>'
    return f'<figure id="{name}">{scrolled}<figcaption class="quiet">{html.escape(caption)}</figcaption></figure>'


def _tables(table: pd.DataFrame) -> str:
    if not len(table):
        return "<p>None.</p>"
    parts = []
    for (run, step, benchmark, temperature, rows_of), part in table.groupby([*MODEL, "of"], sort=False):
        head = [*TEXTS, "count", *COEFFICIENTS.values()]
        body = "\n".join(_row(row) for _, row in part.iterrows())
        title = html.escape(f"{run}@{step} on {benchmark}, T={temperature:g}: a {rows_of} each")
        columns = "".join(f'<th class="{"name" if name in TEXTS else ""}">{name}</th>' for name in head)
        table_of = f"<table><thead><tr>{columns}</tr></thead>\n<tbody>{body}</tbody></table>"
        parts.append(
            f'<h3>{title}</h3><div class="scroll" tabindex="0" role="group" aria-label="{title}">{table_of}</div>'
        )
    return "\n".join(parts)


def _row(row: "pd.Series[object]") -> str:
    texts = "".join(f'<td class="name">{html.escape(str(row[name]))}</td>' for name in TEXTS)
    values = "".join(_cell(*(float(row[name + end]) for end in ("", "_low", "_high"))) for name in COEFFICIENTS)
    return f'<tr>{texts}<td class="n">{row["count"]}</td>{values}</tr>'


def _cell(value: float, low: float, high: float) -> str:
    if not math.isfinite(value):
        return '<td class="n zero">–</td>'
    if not math.isfinite(low):
        return f'<td class="n">{value:.2f}</td>'
    kind = "n zero" if low <= 0 <= high else "n"
    return f'<td class="{kind}">{value:.2f}<br>[{low:.2f}, {high:.2f}]</td>'
