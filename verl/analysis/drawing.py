"""Helpers for drawing the figures of an analysis: styles, panels, legends and files."""

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
"""Maximum number of panels per row, so that figures are readable on a phone and two fit side by side on a screen."""


@dataclass(frozen=True)
class VerdictStyle:
    """Drawing style for responses with the same verdict, correct or wrong."""

    name: str
    correctness: float
    colour: str
    marker: str
    fill: str
    """Fill colour of the marker."""
    line: Any
    """Matplotlib line style."""


VERDICTS = (
    VerdictStyle("correct", 1.0, CORRECT, "o", CORRECT, "-"),
    VerdictStyle("wrong", 0.0, WRONG, "s", "none", (0, (4, 2))),
)


NamedFigure = tuple[str, Figure, str]
"""File name, figure and caption."""


def write_figures(folder: Path, figures: Iterable[NamedFigure]) -> list[tuple[str, str]]:
    """Replace all figures in ``folder`` with ``figures``, as SVG and PNG files, and return their names and captions.

    ``figures`` should be a generator, so that the figures are created while the style is active.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():
        if old.suffix in (".svg", ".png"):
            old.unlink()
    written = []
    with rc_context(fname=STYLE):
        for name, figure, caption in figures:
            FigureCanvasAgg(figure)
            figure.savefig(folder / f"{name}.png")
            # Reuse the layout for the second file, since computing it takes as long as drawing.
            figure.set_layout_engine("none")
            figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
            written.append((name, caption))
    return written


def panels(figure: Figure, names: Sequence[str], width: float, height: float) -> Iterator[tuple[Axes, str]]:
    """Create axes of ``width`` x ``height`` inches for each name, titled with its display name, and yield both."""
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
    """Return the colour and marker of the line with index ``number``, from 0. The first 64 styles are distinct."""
    return {
        "color": COLOURS[number % len(COLOURS)],
        "marker": MARKERS[(number + number // len(COLOURS)) % len(MARKERS)],
    }


def bottom_legend(figure: Figure, handles: Sequence[Line2D]) -> None:
    figure.legend(handles=handles, loc="outside lower center", ncols=min(4, len(handles)), handlelength=2.8)


def heading(figure: Figure, title: str) -> None:
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=12)
