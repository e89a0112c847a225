"""Plots of an evaluation: pass@k curves with confidence bands, and rank metrics split by correctness."""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, PercentFormatter

from verl.evaluation.report.tables import printable
from verl.evaluation.results import safe_name
from verl.evaluation.statistics.summary import AVERAGE, Row, Summary

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8a6d00", "#56b4e9", "#5b4b8a", "#4d4d4d")
"""After Okabe and Ito: told apart by every kind of colour vision, and dark enough for lines on white."""

CORRECT_COLOUR, WRONG_COLOUR = "#0072b2", "#d55e00"
MARKERS = "osD^vPX*"
MAX_BANDS = 4
"""More confidence bands than these hide each other; then every curve has its band at the last k alone."""

GAP = 0.07
"""Between those bands, in doublings of k."""

MAX_COLUMNS = 4
"""Panels beside each other in the figure of all benchmarks."""

STYLE = {
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
    # Text stays text in SVG: it can be searched and copied. A fixed salt makes files equal from run to run.
    "svg.fonttype": "none",
    "svg.hashsalt": "verl",
    # Labels are names, never formulas: a lone dollar sign is not an error.
    "text.parse_math": False,
}


def write_plots(folder: Path, summary: Summary) -> list[Path]:
    """Write every plot to ``folder`` as SVG and PNG, and return the files.

    ``pass_at_k_<benchmark>`` for each benchmark, ``pass_at_k_average`` where there is an average, ``pass_at_k_all``
    with a panel per benchmark where there are several, and ``metric_<name>`` for each rank metric. Plots of an earlier
    evaluation are removed.
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


def label_styles(labels: Sequence[str]) -> dict[str, dict[str, object]]:
    """Line styles by label: one colour and marker per run, lighter for earlier steps; step 0 is dashed."""
    parts = {label: re.fullmatch(r"(.*)@(\d+)(?: T=.*)?", label, re.DOTALL) for label in labels}
    runs = list(dict.fromkeys(match.group(1) if match else label for label, match in parts.items()))
    members: dict[str, list[str]] = {run: [] for run in runs}
    for label, match in parts.items():
        members[match.group(1) if match else label].append(label)
    styles: dict[str, dict[str, object]] = {}
    for number, run in enumerate(runs):
        base, marker = COLOURS[number % len(COLOURS)], MARKERS[(number + number // len(COLOURS)) % len(MARKERS)]
        trained = [label for label in members[run] if not _is_base(parts[label])]
        for label in members[run]:
            if _is_base(parts[label]):
                styles[label] = {"color": lighter(base, 0.35 if trained else 0.0), "linestyle": (0, (4, 2))}
            else:
                age = 1 - (trained.index(label) + 1) / len(trained)
                styles[label] = {"color": lighter(base, 0.55 * age), "linestyle": "-"}
            styles[label] |= {"marker": marker, "markeredgecolor": "white", "markeredgewidth": 0.8}
            if _is_base(parts[label]):
                styles[label] |= {"markerfacecolor": "white", "markeredgecolor": styles[label]["color"]}
    return styles


def _is_base(match: re.Match[str] | None) -> bool:
    return match is not None and int(match.group(2)) == 0


def lighter(colour: str, share: float) -> str:
    """``colour`` mixed with ``share`` of white, as ``#rrggbb``."""
    return "#" + "".join(f"{round(255 * (c + (1 - c) * share)):02x}" for c in to_rgb(colour))


def pass_figure(summary: Summary, benchmark: str) -> Figure:
    """pass@k curves of every run on one benchmark, or on the average."""
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
    """One small panel of pass@k curves per benchmark, all on one scale of k, with one legend below."""
    names = [*benchmarks, *([AVERAGE] if summary.averages else [])]
    columns = min(MAX_COLUMNS, math.ceil(math.sqrt(len(names))))
    lines = math.ceil(len(names) / columns)
    figure = Figure(figsize=(3.0 * columns + 0.4, 2.5 * lines + 0.7), layout="constrained")
    grid = figure.subplots(lines, columns, squeeze=False)
    styles = label_styles(summary.labels)
    for axes, name in zip(grid.flat, names, strict=False):
        rows = _rows(summary, name)
        _draw_curves(axes, rows, styles, small=True)
        axes.set_title(printable(name), fontsize=10)
    for axes in list(grid.flat)[len(names) :]:
        axes.set_visible(False)
    figure.supylabel("pass@k", fontsize=10, color="#333333")
    handles = [Line2D([], [], **styles[label], label=printable(label)) for label in summary.labels]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), columns + 1), handlelength=2.6)
    return figure


def metric_figure(summary: Summary, metric: str) -> Figure:
    """A rank metric of correct and of wrong responses: median, and the range of the middle half, per run."""
    rows = [row for row in summary.rows if metric in row.metrics]
    names = [name for name in summary.benchmarks if any(row.benchmark == name for row in rows)]
    columns = min(MAX_COLUMNS, math.ceil(math.sqrt(len(names))))
    lines = math.ceil(len(names) / columns)
    labels = [label for label in summary.labels if any(row.label == label for row in rows)]
    height = 0.42 * len(labels) + 0.75
    figure = Figure(figsize=(max(6.4, 3.1 * columns + 1.0), max(2.2, height * lines + 0.7)), layout="constrained")
    grid = figure.subplots(lines, columns, squeeze=False, sharex=True, sharey=True)
    for axes, name in zip(grid.flat, names, strict=False):
        _draw_spreads(axes, [row for row in rows if row.benchmark == name], labels, metric)
        axes.set_title(printable(name), fontsize=10)
    for axes in list(grid.flat)[len(names) :]:
        axes.set_visible(False)
    figure.suptitle(printable(metric), x=0.01, ha="left", fontweight="bold", fontsize=12)
    handles = [
        Line2D([], [], color=CORRECT_COLOUR, marker="o", linewidth=3, label="correct responses"),
        Line2D([], [], color=WRONG_COLOUR, marker="s", markerfacecolor="white", linewidth=3, label="wrong responses"),
        Line2D([], [], color="none", label="mark: median, bar: middle half"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3)
    return figure


def _rows(summary: Summary, benchmark: str) -> list[Row]:
    found = [summary.row(label, benchmark) for label in summary.labels]
    return [row for row in found if row is not None]


def _title(summary: Summary, benchmark: str, rows: Sequence[Row]) -> str:
    problems = max((row.num_problems for row in rows), default=0)
    if benchmark == AVERAGE:
        return f"Mean of {len(summary.averaged)} benchmarks"
    return f"{printable(benchmark)}  ({problems} problem{'s' * (problems != 1)})"


def _draw_curves(
    axes: Axes, rows: Sequence[Row], styles: Mapping[str, Mapping[str, object]], small: bool = False
) -> None:
    """pass@k over k, the axis of k in powers of two."""
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
            # Side by side, to the right of the last k.
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


def _draw_spreads(axes: Axes, rows: Sequence[Row], labels: Sequence[str], metric: str) -> None:
    """Two bars per run, correct above wrong; the first run on top."""
    for row in rows:
        if metric not in row.metrics:
            continue
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
