"""Figures of evaluations and analyses: their style, panels and files; pass@k curves with confidence bands, and rank
metrics split by correctness."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, PercentFormatter

from verl.evaluation.results import safe_name
from verl.evaluation.statistics import AVERAGE, Summary, SummaryRow
from verl.utils.portable import printable
from verl_pages.colours import COLOURS, CORRECT, WRONG, lighter
from verl_pages.names import metric_name

STYLE = Path(__file__).with_name("figures.mplstyle")
MARKERS = "osD^vPX*"

MAX_COLUMNS = 5
"""Panels beside each other in a figure."""

MAX_BANDS = 4
"""With more curves their confidence bands would hide each other: each is then drawn only at the last k."""

GAP = 0.07
"""Distance between those bands, in doublings of k."""


@dataclass(frozen=True)
class Verdict:
    """How the responses of one verdict are drawn."""

    name: str
    correctness: float
    colour: str
    marker: str
    fill: str
    """Colour inside the marker."""
    line: Any
    """Line style."""


VERDICTS = (
    Verdict("correct", 1.0, CORRECT, "o", CORRECT, "-"),
    Verdict("wrong", 0.0, WRONG, "s", "none", (0, (4, 2))),
)


@dataclass(frozen=True)
class NamedFigure:
    """A figure with its file name and the sentence below it."""

    name: str
    figure: Figure
    caption: str = ""


def write_figures(
    folder: Path, figures: Iterable[NamedFigure], replaced: Sequence[str] = ("",)
) -> list[tuple[str, str]]:
    """Write each figure to ``folder`` as SVG and PNG; their names and captions.

    Earlier SVG and PNG files whose names begin with one of ``replaced`` are removed. Pass a generator, so that figures
    are drawn in our style.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():
        if old.suffix in (".svg", ".png") and old.name.startswith(tuple(replaced)):
            old.unlink()
    written = []
    with rc_context(fname=STYLE):
        for drawn in figures:
            FigureCanvasAgg(drawn.figure)
            drawn.figure.savefig(folder / f"{drawn.name}.png")
            # The layout is computed once for both files: that takes as long as drawing.
            drawn.figure.set_layout_engine("none")
            drawn.figure.savefig(folder / f"{drawn.name}.svg", metadata={"Date": None})
            written.append((drawn.name, drawn.caption))
    return written


def panels(
    figure: Figure, names: Sequence[str], width: float, height: float, shared: bool = False, most: int = MAX_COLUMNS
) -> Iterator[tuple[Axes, str]]:
    """An axes of ``width`` x ``height`` inches for each name, titled with what pages call it.

    ``shared``: all have the same ranges; ``most``: panels beside each other.
    """
    columns = min(most, len(names) if len(names) <= 3 else math.ceil(math.sqrt(len(names))))
    lines = -(-len(names) // columns)
    figure.set_size_inches(width * columns + 0.4, height * lines + 0.8)
    axes = list(figure.subplots(lines, columns, squeeze=False, sharex=shared, sharey=shared).flat)
    for panel, name in zip(axes, names, strict=False):
        panel.set_title(metric_name(name), fontsize=10)
        yield panel, name
    for panel in axes[len(names) :]:
        panel.set_visible(False)


def line_style(number: int) -> dict[str, Any]:
    """Colour and marker of the line ``number``, from 0; those of the first 64 differ."""
    return {
        "color": COLOURS[number % len(COLOURS)],
        "marker": MARKERS[(number + number // len(COLOURS)) % len(MARKERS)],
    }


def draw_box(axes: Axes, position: float, stats: Mapping[str, float], verdict: Verdict, width: float) -> None:
    """A horizontal box at ``position``; ``stats`` as in ``matplotlib.cbook.boxplot_stats``."""
    style = {"color": verdict.colour, "linewidth": 1.4}
    axes.bxp(
        [dict(stats)],
        positions=[position],
        orientation="horizontal",
        widths=width,
        showfliers=False,
        manage_ticks=False,
        boxprops=style,
        medianprops=style | {"linewidth": 2.4},
        whiskerprops=style,
        capprops=style,
    )


def bottom_legend(figure: Figure, handles: Sequence[Line2D], columns: int = 4) -> None:
    figure.legend(handles=handles, loc="outside lower center", ncols=min(columns, len(handles)), handlelength=2.8)


def heading(figure: Figure, title: str) -> None:
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=12)


def draw_plots(summary: Summary) -> Iterator[NamedFigure]:
    """Every plot of an evaluation.

    ``pass_at_k_<benchmark>`` for each benchmark, ``pass_at_k_average`` if there is an average, ``pass_at_k_all`` with a
    panel for each of several benchmarks, and ``metric_<name>`` for each rank metric.
    """
    drawn = [name for name in summary.benchmarks if any(row.pass_at_k for row in _rows(summary, name))]
    for name in drawn:
        yield NamedFigure(f"pass_at_k_{safe_name(name)}", pass_figure(summary, name))
    if summary.averages:
        yield NamedFigure("pass_at_k_average", pass_figure(summary, AVERAGE))
    if len(drawn) > 1:
        yield NamedFigure("pass_at_k_all", panels_figure(summary, drawn))
    for metric in dict.fromkeys(name for row in summary.rows for name in row.metrics):
        yield NamedFigure(f"metric_{safe_name(metric.replace(' ', '_'))}", metric_figure(summary, metric))


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
        base = line_style(number)
        trained = [label for label in run if not is_base[label]]
        for label in run:
            if is_base[label]:
                colour = lighter(base["color"], 0.35 if trained else 0.0)
                style = {"linestyle": (0, (4, 2)), "markerfacecolor": "white", "markeredgecolor": colour}
            else:
                colour = lighter(base["color"], 0.55 * (1 - (trained.index(label) + 1) / len(trained)))
                style = {"linestyle": "-", "markeredgecolor": "white"}
            styles[label] = base | {"color": colour, "markeredgewidth": 0.8} | style
    return styles


def pass_figure(summary: Summary, benchmark: str) -> Figure:
    """pass@k curves of every run on one benchmark, or of the average."""
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.add_subplot()
    rows = _rows(summary, benchmark)
    _draw_curves(axes, rows, label_styles(summary.labels))
    problems = max(row.num_problems for row in rows)
    title = f"{printable(benchmark)}  ({problems} problem{'s' * (problems != 1)})"
    axes.set_title(f"Mean of {len(summary.averaged)} benchmarks" if benchmark == AVERAGE else title)
    axes.set_ylabel("pass@k")
    axes.set_xlabel("k, samples per problem")
    columns = 1 if len(rows) <= 6 else 2
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), ncols=columns, handlelength=2.6, borderaxespad=0.8)
    if len(rows) > 3:
        figure.set_size_inches(7.4 + 1.6 * (columns - 1), 4.2)
    return figure


def panels_figure(summary: Summary, benchmarks: Sequence[str]) -> Figure:
    """One small panel of pass@k curves per benchmark, and one legend below."""
    figure = Figure(layout="constrained")
    names = [*benchmarks, *([AVERAGE] if summary.averages else [])]
    styles = label_styles(summary.labels)
    for (axes, _), name in zip(panels(figure, list(map(printable, names)), 3.0, 2.5), names, strict=True):
        _draw_curves(axes, _rows(summary, name), styles, small=True)
    figure.supylabel("pass@k", fontsize=10, color="#333333")
    bottom_legend(figure, [Line2D([], [], **styles[label], label=printable(label)) for label in summary.labels])
    return figure


def metric_figure(summary: Summary, metric: str) -> Figure:
    """A rank metric of correct and of wrong responses: median and middle half, per run; the first run is on top."""
    figure = Figure(layout="constrained")
    rows = [row for row in summary.rows if metric in row.metrics]
    names = [name for name in summary.benchmarks if any(row.benchmark == name for row in rows)]
    labels = [label for label in reversed(summary.labels) if any(row.label == label for row in rows)]
    height = 0.42 * len(labels) + 0.75
    shown = panels(figure, list(map(printable, names)), 3.1, height, shared=True)
    for (axes, _), name in zip(shown, names, strict=True):
        for row in rows:
            for verdict, offset in zip(VERDICTS, (0.15, -0.15), strict=True):
                spread = row.metrics[metric][verdict.name]
                if row.benchmark == name and spread.count:
                    low, middle, high = spread.quartiles
                    stats = {"q1": low, "med": middle, "q3": high, "whislo": low, "whishi": high}
                    draw_box(axes, labels.index(row.label) + offset, stats, verdict, 0.22)
        axes.set_ylim(-0.6, len(labels) - 0.4)
        axes.set_yticks(range(len(labels)), list(map(printable, labels)))
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="y", visible=False)
        axes.spines["left"].set_visible(False)
        axes.locator_params(axis="x", nbins=5)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.4g}"))
    width, height = figure.get_size_inches()
    figure.set_size_inches(max(6.4, width), max(2.2, height))
    heading(figure, f"{printable(metric_name(metric))}: median and middle half")
    bottom_legend(figure, [Line2D([], [], color=v.colour, label=f"{v.name} responses") for v in VERDICTS])
    return figure


def _rows(summary: Summary, benchmark: str) -> list[SummaryRow]:
    found = [summary.row(label, benchmark) for label in summary.labels]
    return [row for row in found if row is not None]


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
