"""Plots of an evaluation: pass@k curves with confidence bands, and rank metrics split by correctness."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, PercentFormatter

from verl.evaluation.results import safe_name
from verl.evaluation.statistics.summary import AVERAGE, Summary, SummaryRow
from verl.utils.portable import printable
from verl_pages.colours import COLOURS, lighter

CORRECT_COLOUR, WRONG_COLOUR = "#0072b2", "#d55e00"
MARKERS = "osD^vPX*"
MAX_BANDS = 4
"""With more curves their confidence bands would hide each other: each is then drawn only at the last k."""

GAP = 0.07
"""Distance between those bands, in doublings of k."""

MAX_COLUMNS = 4
"""Panels beside each other in a figure."""

STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.edgecolor": "#8c8c8c",
    "axes.labelcolor": "#333333",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.8,
    "xtick.color": "#555555",
    "ytick.color": "#555555",
    "legend.frameon": False,
    "lines.linewidth": 2.0,
    "lines.markersize": 5.5,
    "savefig.dpi": 160,
    # Text stays text in SVG, so that it can be searched and copied. A fixed salt makes files reproducible.
    "svg.fonttype": "none",
    "svg.hashsalt": "verl",
    # Labels are names, not formulas: a lone dollar sign is not an error.
    "text.parse_math": False,
}


def write_plots(folder: Path, summary: Summary) -> list[Path]:
    """Write every plot to ``folder`` as SVG and PNG, and return the files.

    ``pass_at_k_<benchmark>`` for each benchmark, ``pass_at_k_average`` if there is an average, ``pass_at_k_all`` with a
    panel for each of several benchmarks, and ``metric_<name>`` for each rank metric. Plots of an earlier evaluation are
    removed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for old in [path for name in ("pass_at_k", "metric") for path in folder.glob(f"{name}_*") if path.is_file()]:
        old.unlink()
    written: list[Path] = []
    with rc_context(STYLE):
        drawn = [name for name in summary.benchmarks if any(row.pass_at_k for row in _rows(summary, name))]
        for name in drawn:
            written += _save(pass_figure(summary, name), folder, f"pass_at_k_{safe_name(name)}")
        if summary.averages:
            written += _save(pass_figure(summary, AVERAGE), folder, "pass_at_k_average")
        if len(drawn) > 1:
            written += _save(panels_figure(summary, drawn), folder, "pass_at_k_all")
        for metric in dict.fromkeys(name for row in summary.rows for name in row.metrics):
            written += _save(metric_figure(summary, metric), folder, f"metric_{safe_name(metric.replace(' ', '_'))}")
    return written


def label_styles(labels: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Line styles by label: one colour and marker per run, lighter for earlier steps; step 0 is dashed."""
    members: dict[str, list[str]] = {}
    is_base: dict[str, bool] = {}
    for label in labels:
        match = re.fullmatch(r"(.*)@(\d+)(?: T=.*)?", label, re.DOTALL)
        members.setdefault(match.group(1) if match else label, []).append(label)
        is_base[label] = match is not None and int(match.group(2)) == 0
    styles: dict[str, dict[str, Any]] = {}
    for number, run in enumerate(members.values()):
        colour, marker = COLOURS[number % len(COLOURS)], MARKERS[(number + number // len(COLOURS)) % len(MARKERS)]
        trained = [label for label in run if not is_base[label]]
        for label in run:
            if is_base[label]:
                own = lighter(colour, 0.35 if trained else 0.0)
                style = {"linestyle": (0, (4, 2)), "markerfacecolor": "white", "markeredgecolor": own}
            else:
                own = lighter(colour, 0.55 * (1 - (trained.index(label) + 1) / len(trained)))
                style = {"linestyle": "-", "markeredgecolor": "white"}
            styles[label] = {"color": own, "marker": marker, "markeredgewidth": 0.8, **style}
    return styles


def pass_figure(summary: Summary, benchmark: str) -> Figure:
    """pass@k curves of every run on one benchmark, or of the average."""
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.add_subplot()
    rows = _rows(summary, benchmark)
    _draw_curves(axes, rows, label_styles(summary.labels))
    axes.set_title(_title(summary, benchmark, rows))
    axes.set_ylabel("pass@k")
    axes.set_xlabel("k, samples per problem")
    columns = 1 if len(rows) <= 6 else 2
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), ncols=columns, handlelength=2.6, borderaxespad=0.8)
    if len(rows) > 3:
        figure.set_size_inches(7.4 + 1.6 * (columns - 1), 4.2)
    return figure


def panels_figure(summary: Summary, benchmarks: Sequence[str]) -> Figure:
    """One small panel of pass@k curves per benchmark, all with the same k, and one legend below."""
    names = [*benchmarks, *([AVERAGE] if summary.averages else [])]
    lines, columns = _grid(len(names))
    figure = Figure(figsize=(3.0 * columns + 0.4, 2.5 * lines + 0.7), layout="constrained")
    styles = label_styles(summary.labels)
    for axes, name in _panels(figure, names):
        _draw_curves(axes, _rows(summary, name), styles, small=True)
    figure.supylabel("pass@k", fontsize=10, color="#333333")
    handles = [Line2D([], [], **styles[label], label=printable(label)) for label in summary.labels]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), columns + 1), handlelength=2.6)
    return figure


def metric_figure(summary: Summary, metric: str) -> Figure:
    """A rank metric of correct and of wrong responses: median, and the range of the middle half, per run."""
    rows = [row for row in summary.rows if metric in row.metrics]
    names = [name for name in summary.benchmarks if any(row.benchmark == name for row in rows)]
    labels = [label for label in summary.labels if any(row.label == label for row in rows)]
    lines, columns = _grid(len(names))
    height = 0.42 * len(labels) + 0.75
    figure = Figure(figsize=(max(6.4, 3.1 * columns + 1.0), max(2.2, height * lines + 0.7)), layout="constrained")
    for axes, name in _panels(figure, names, share=True):
        _draw_spreads(axes, [row for row in rows if row.benchmark == name], labels, metric)
    figure.suptitle(printable(metric), x=0.01, ha="left", fontweight="bold", fontsize=12)
    handles = [
        Line2D([], [], color=CORRECT_COLOUR, marker="o", linewidth=3, label="correct responses"),
        Line2D([], [], color=WRONG_COLOUR, marker="s", markerfacecolor="white", linewidth=3, label="wrong responses"),
        Line2D([], [], color="none", label="mark: median, bar: middle half"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3)
    return figure


def _grid(panels: int) -> tuple[int, int]:
    """Lines and columns of a figure with so many panels."""
    columns = min(MAX_COLUMNS, math.ceil(math.sqrt(panels)))
    return math.ceil(panels / columns), columns


def _panels(figure: Figure, names: Sequence[str], share: bool = False) -> Iterator[tuple[Axes, str]]:
    """An axes for each name, under it as title; ``share``: with the same ranges."""
    axes = list(figure.subplots(*_grid(len(names)), squeeze=False, sharex=share, sharey=share).flat)
    for panel, name in zip(axes, names, strict=False):
        panel.set_title(printable(name), fontsize=10)
        yield panel, name
    for panel in axes[len(names) :]:
        panel.set_visible(False)


def _rows(summary: Summary, benchmark: str) -> list[SummaryRow]:
    found = [summary.row(label, benchmark) for label in summary.labels]
    return [row for row in found if row is not None]


def _title(summary: Summary, benchmark: str, rows: Sequence[SummaryRow]) -> str:
    problems = max((row.num_problems for row in rows), default=0)
    if benchmark == AVERAGE:
        return f"Mean of {len(summary.averaged)} benchmarks"
    return f"{printable(benchmark)}  ({problems} problem{'s' * (problems != 1)})"


def _draw_curves(
    axes: Axes, rows: Sequence[SummaryRow], styles: Mapping[str, Mapping[str, Any]], small: bool = False
) -> None:
    """Draw pass@k over k, on a logarithmic axis."""
    ks = sorted({k for row in rows for k in row.pass_at_k})
    curves = [row for row in rows if row.pass_at_k]
    for place, row in enumerate(curves):
        style = dict(styles[row.label])
        if small:
            style |= {"linewidth": 1.6, "markersize": 4}
        ks_of_row, estimates = list(row.pass_at_k), list(row.pass_at_k.values())
        values = [e.value for e in estimates]
        axes.plot(ks_of_row, values, label=printable(row.label), zorder=3 + 0.01 * place, **style)
        low = [v if math.isnan(e.low) else e.low for v, e in zip(values, estimates, strict=True)]
        high = [v if math.isnan(e.high) else e.high for v, e in zip(values, estimates, strict=True)]
        if len(curves) <= MAX_BANDS and len(ks) > 1:
            axes.fill_between(ks_of_row, low, high, color=style["color"], alpha=0.13, linewidth=0)
        elif not small:
            # Side by side, right of the last k.
            axes.vlines(ks[-1] * 2 ** (GAP * (place + 1)), low[-1], high[-1], color=style["color"], linewidth=1.4)
    if not ks:
        return
    axes.set_xscale("log", base=2)
    shown = ks if len(ks) <= 6 else [*ks[:-2:2], ks[-1]]
    axes.set_xticks(shown, [str(k) for k in shown])
    axes.minorticks_off()
    beside = GAP * (len(curves) + 1) if len(curves) > MAX_BANDS or len(ks) == 1 else 0.0
    axes.set_xlim(ks[0] / 2**0.15, ks[-1] * 2 ** (0.15 + beside * (not small)))
    top = max(min(1.0, e.high if math.isfinite(e.high) else e.value) for r in curves for e in r.pass_at_k.values())
    axes.set_ylim(0, max(0.05, min(1.02, top * 1.06)))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None if top < 0.1 else 0))
    axes.grid(axis="x", visible=False)


def _draw_spreads(axes: Axes, rows: Sequence[SummaryRow], labels: Sequence[str], metric: str) -> None:
    """Draw two bars per run, correct above wrong; the first run is on top."""
    for row in rows:
        centre = len(labels) - 1 - labels.index(row.label)
        for group, colour, marker, offset in (
            ("correct", CORRECT_COLOUR, "o", 0.15),
            ("wrong", WRONG_COLOUR, "s", -0.15),
        ):
            spread = row.metrics[metric][group]
            if not spread.count:
                continue
            low, middle, high = spread.quartiles
            axes.hlines(centre + offset, low, high, color=colour, linewidth=3.2, alpha=0.45)
            fill = colour if group == "correct" else "white"
            axes.plot(middle, centre + offset, marker, color=colour, markerfacecolor=fill, markeredgewidth=1.4)
    axes.set_ylim(-0.6, len(labels) - 0.4)
    axes.set_yticks(range(len(labels)), [printable(label) for label in reversed(labels)])
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", visible=False)
    axes.spines["left"].set_visible(False)
    axes.locator_params(axis="x", nbins=5)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.4g}"))


def _save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Write the figure as SVG and PNG."""
    FigureCanvasAgg(figure)
    paths = [folder / f"{name}.svg", folder / f"{name}.png"]
    figure.savefig(paths[0], metadata={"Date": None})
    figure.savefig(paths[1])
    return paths
