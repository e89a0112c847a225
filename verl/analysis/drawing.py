"""Drawing of an analysis's figures: their style, panels, boxes and files."""

from collections.abc import Iterable, Iterator, Sequence
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

MAX_COLUMNS = 2
"""Panels per row of a figure, which is read on a phone, and two fit next to each other on a screen."""


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


def write_figures(folder: Path, figures: Iterable[NamedFigure]) -> list[tuple[str, str]]:
    """Write each figure to ``folder`` as SVG and PNG, which replace earlier ones; return their names and captions.

    Pass a generator, so that figures are drawn in this style.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():
        if old.suffix in (".svg", ".png"):
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


def panels(figure: Figure, names: Sequence[str], width: float, height: float) -> Iterator[tuple[Axes, str]]:
    """Yield an axes of ``width`` x ``height`` inches for each name, titled with its display name."""
    columns = min(MAX_COLUMNS, len(names))
    lines = -(-len(names) // columns)
    figure.set_size_inches(width * columns + 0.4, height * lines + 0.8)
    axes = list(figure.subplots(lines, columns, squeeze=False).flat)
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


def bottom_legend(figure: Figure, handles: Sequence[Line2D]) -> None:
    figure.legend(handles=handles, loc="outside lower center", ncols=min(4, len(handles)), handlelength=2.8)


def heading(figure: Figure, title: str) -> None:
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=12)
