"""The page of an analysis: figures and correlations in one HTML file that loads nothing and runs no script."""

import base64
import hashlib
import html
import math
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

STYLE = """
:root { color-scheme: light dark; --text: #1f2328; --soft: #57606a; --line: #d0d7de; --back: #fff; }
@media (prefers-color-scheme: dark) { :root { --text: #e6edf3; --soft: #9198a1; --line: #3d444d; --back: #0d1117; } }
body { margin: 0 auto; max-width: 76rem; padding: 1.5rem; font: 15px/1.5 system-ui, sans-serif; color: var(--text);
  background: var(--back); }
h1 { font-size: 1.5rem; margin: 0 0 .3rem; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem; }
p, figcaption { color: var(--soft); max-width: 60rem; }
nav a { margin-right: 1.2rem; }
a { color: inherit; }
figure { margin: 1rem 0 1.6rem; }
figure div { overflow-x: auto; background: #fff; border: 1px solid var(--line); border-radius: 6px; padding: .5rem; }
img { display: block; max-width: none; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; }
th, td { padding: .25rem .6rem; border-bottom: 1px solid var(--line); text-align: left; white-space: nowrap; }
td.n { text-align: right; font-variant-numeric: tabular-nums; }
td.zero { color: var(--soft); }
@media print { body { max-width: none; } figure, tr { break-inside: avoid; } }
"""

COEFFICIENTS = {
    "pearson": "Pearson",
    "spearman": "Spearman",
    "pearson_partial": "Pearson, length fixed",
    "spearman_partial": "Spearman, length fixed",
}

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
<h1>{html.escape(title)}</h1>
{"".join(f"<p>{html.escape(line)}</p>" for line in lines)}
<nav><a href="#figures">Figures</a><a href="#correlations">Correlations</a></nav>
<h2 id="figures">Figures</h2>
{drawn}
<h2 id="correlations">Correlations</h2>
<p>Below each coefficient its 95% interval, from a bootstrap over prompts; grey where the interval holds 0.
Length fixed: partial correlations given the length of responses.</p>
{_tables(table)}
</body>
</html>
"""


def _figure(path: Path, caption: str) -> str:
    name = html.escape(path.stem)
    data = base64.b64encode(path.read_bytes()).decode()
    image = f'<img alt="{name}" src="data:image/svg+xml;base64,{data}">'
    return f'<figure id="{name}"><div>{image}</div><figcaption>{html.escape(caption)}</figcaption></figure>'


def _tables(table: pd.DataFrame) -> str:
    if not len(table):
        return "<p>None.</p>"
    parts = []
    for (run, step, benchmark, temperature, rows_of), part in table.groupby([*MODEL, "of"], sort=False):
        head = ["x", "y", "responses", "count", *COEFFICIENTS.values()]
        body = "\n".join(_row(row) for _, row in part.iterrows())
        title = html.escape(f"{run}@{step} on {benchmark}, T={temperature:g}: a {rows_of} each")
        columns = "".join(f"<th>{name}</th>" for name in head)
        parts.append(f'<h3>{title}</h3><div class="scroll"><table><tr>{columns}</tr>\n{body}\n</table></div>')
    return "\n".join(parts)


def _row(row: "pd.Series[object]") -> str:
    texts = "".join(f"<td>{html.escape(str(row[name]))}</td>" for name in ("x", "y", "responses"))
    values = "".join(_cell(*(float(row[name + end]) for end in ("", "_low", "_high"))) for name in COEFFICIENTS)
    return f'<tr>{texts}<td class="n">{row["count"]}</td>{values}</tr>'


def _cell(value: float, low: float, high: float) -> str:
    if not math.isfinite(value):
        return '<td class="n zero">–</td>'
    if not math.isfinite(low):
        return f'<td class="n">{value:.2f}</td>'
    kind = "n zero" if low <= 0 <= high else "n"
    return f'<td class="{kind}">{value:.2f}<br>[{low:.2f}, {high:.2f}]</td>'
