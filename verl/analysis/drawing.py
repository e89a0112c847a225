"""Drawing of an analysis's figures: their style, panels, boxes and files."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from verl_pages.colours import COLOURS, CORRECT, WRONG
from verl_pages.names import metric_name

STYLE = Path(__file__).with_name("figures.mplstyle")
MARKERS = "osD^vPX*"

MAX_COLUMNS = 5
"""Panels per row of a figure."""


@dataclass(frozen=True)
class VerdictStyle:
    """Style of the responses of one verdict."""

    name: str
    correctness: float
    colour: str
    marker: str
    fill: str
    """Colour inside the marker."""
    line: Any
    """Line style."""


VERDICTS = (
    VerdictStyle("correct", 1.0, CORRECT, "o", CORRECT, "-"),
    VerdictStyle("wrong", 0.0, WRONG, "s", "none", (0, (4, 2))),
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
    """Write each figure to ``folder`` as SVG and PNG; return their names and captions.

    Earlier SVG and PNG files whose names begin with one of ``replaced`` are removed. Pass a generator, so that figures
    are drawn in this style.
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
    """Yield an axes of ``width`` x ``height`` inches for each name, titled with its display name.

    ``shared``: all have the same ranges; ``most``: panels per row.
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
    """Return colour and marker of the line ``number``, from 0; the first 64 lines differ."""
    return {
        "color": COLOURS[number % len(COLOURS)],
        "marker": MARKERS[(number + number // len(COLOURS)) % len(MARKERS)],
    }


def draw_box(axes: Axes, position: float, stats: Mapping[str, float], verdict: VerdictStyle, width: float) -> None:
    """Draw a horizontal box at ``position``; ``stats`` as in ``matplotlib.cbook.boxplot_stats``."""
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
