"""How each kind of figure is drawn: a table and names of its columns in, a figure out."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from verl.analysis.sheets import column
from verl.config.analysis import AnalysisConfig
from verl.evaluation.report.plots import CORRECT_COLOUR, MARKERS, WRONG_COLOUR
from verl.evaluation.statistics.bootstrap import mean_estimates
from verl_pages.colours import COLOURS

VERDICTS: tuple[tuple[str, float, str, str, Any], ...] = (
    ("correct", 1.0, CORRECT_COLOUR, "o", "-"),
    ("wrong", 0.0, WRONG_COLOUR, "s", (0, (4, 2))),
)
"""Name, value of ``correctness``, colour, marker and line."""

MAX_POINTS = 2000
"""Points of a scatter; of more, as many at random are drawn."""

MIN_ALIVE = 5
"""A curve along the response ends where fewer responses go on."""

DRAWS = 500
"""Bootstrap draws of the bands."""


def scatter_figure(
    rows: pd.DataFrame, pairs: Sequence[Sequence[str]], correlations: pd.DataFrame, colour: str, title: str
) -> Figure:
    """Exploration (x) against exploitation (y) for each pair, with the histograms of both at the margins."""
    columns = min(2, len(pairs))
    lines = -(-len(pairs) // columns)
    figure = Figure(figsize=(4.8 * columns, 4.3 * lines + 0.7), layout="constrained")
    points = rows.sample(MAX_POINTS, random_state=0) if len(rows) > MAX_POINTS else rows
    by_verdict = colour == "correctness"
    for part, (x, y) in zip(figure.subfigures(lines, columns, squeeze=False).flat, pairs, strict=False):
        grid = part.add_gridspec(2, 2, width_ratios=(5, 1), height_ratios=(1, 5), wspace=0.04, hspace=0.04)
        axes = part.add_subplot(grid[1, 0])
        top, right = part.add_subplot(grid[0, 0], sharex=axes), part.add_subplot(grid[1, 1], sharey=axes)
        drawn = None
        edges = [_edges(rows[name]) for name in (x, y)]
        # The rarer verdict is drawn on top.
        verdicts = sorted(VERDICTS, key=lambda verdict: -int((points[colour] == verdict[1]).sum()))
        for name, value, own, marker, _ in verdicts if by_verdict else ():
            of = points[points[colour] == value]
            fill = own if name == "correct" else "none"
            axes.scatter(of[x], of[y], s=14, marker=marker, facecolors=fill, edgecolors=own, alpha=0.55, linewidths=0.8)
            _histograms(top, right, rows[rows[colour] == value], x, y, edges, own)
        if not by_verdict:
            drawn = axes.scatter(points[x], points[y], s=18, c=points[colour], cmap="cividis", vmin=0, vmax=1)
            _histograms(top, right, rows, x, y, edges, "#4d4d4d")
        for margin in (top, right):
            margin.axis("off")
        axes.set_xlabel(f"{x}  (exploration)")
        axes.set_ylabel(f"{y}  (exploitation)")
        top.set_title(_correlation_line(correlations, x, y), fontsize=8.5, fontweight="normal")
        if drawn is not None:
            part.colorbar(drawn, ax=right, label=colour, location="right")
    _finish(figure, title, by_verdict, lines=False)
    return figure


def correctness_figure(rows: pd.DataFrame, metrics: Sequence[str], title: str) -> Figure:
    """The distribution of each metric over correct and over wrong responses."""
    figure = Figure(layout="constrained")
    for axes, name in _panels(figure, metrics, 2.2, 1.9):
        for place, (_, value, own, _, _) in enumerate(VERDICTS):
            values = rows.loc[rows["correctness"] == value, name].dropna()
            if len(values):
                style = {"color": own, "linewidth": 1.4}
                axes.boxplot(
                    values,
                    positions=[1 - place],
                    orientation="horizontal",
                    widths=0.6,
                    whis=(5, 95),
                    showfliers=False,
                    boxprops=style,
                    medianprops=style | {"linewidth": 2.4},
                    whiskerprops=style,
                    capprops=style,
                )
        axes.set_yticks([1, 0], [name for name, *_ in VERDICTS])
        axes.grid(axis="y", visible=False)
        axes.locator_params(axis="x", nbins=4)
    _finish(figure, title, legend=False)
    return figure


def course_figure(courses: pd.DataFrame, metrics: Sequence[str], title: str) -> Figure:
    """Each metric along the response, of correct and of wrong ones."""
    figure = Figure(layout="constrained")
    # The last point of a response is its end, wherever that falls: positions that all responses share are kept.
    whole = courses.groupby(["prompt_id", "rollout_id"])["tokens"].transform("max")
    shared = courses[courses["tokens"] < whole]
    for axes, name in _panels(figure, metrics, 3.0, 2.3):
        for _, value, own, _, line in VERDICTS:
            of = shared[shared["correctness"] == value]
            counts = of.groupby("tokens")[name].count()
            positions = [int(p) for p in counts[counts >= MIN_ALIVE].index]
            at = [of[of["tokens"] == position] for position in positions]
            _band(axes, positions, at, name, own, line)
        axes.set_xlabel("tokens")
    _finish(figure, title)
    return figure


def layer_figure(config: AnalysisConfig, rows: pd.DataFrame, title: str) -> Figure:
    """Each rank metric over the layers, of correct and of wrong responses."""
    layers = config.calculator.layers
    # From the first layer to the last, whatever their order in the config.
    places = sorted(range(len(layers)), key=lambda place: (layers[place] < 0, layers[place]))
    figure = Figure(layout="constrained")
    for axes, name in _panels(figure, config.calculator.metric_names, 3.0, 2.3):
        for _, value, own, _, line in VERDICTS:
            of = rows[rows["correctness"] == value]
            columns = [column(config, place, name) for place in places]
            frames = [of[["prompt_id", own_column]].rename(columns={own_column: name}) for own_column in columns]
            _band(axes, range(len(layers)), frames if len(of) else [], name, own, line)
        axes.set_xticks(range(len(layers)), [str(layers[place]) for place in places])
        axes.set_xlabel("layer")
    _finish(figure, title)
    return figure


def checkpoint_figure(responses: pd.DataFrame, metrics: Sequence[str]) -> Figure:
    """The mean of each metric over training steps, a line for each run, benchmark and temperature."""
    figure = Figure(layout="constrained")
    lines = list(responses.groupby(["run", "benchmark", "temperature"], sort=False))
    several = responses["temperature"].nunique() > 1
    for axes, name in _panels(figure, metrics, 2.4, 2.1):
        for number, (_, part) in enumerate(lines):
            steps = sorted(part["step"].unique())
            colour, marker = COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)]
            found = [_estimate(part[part["step"] == step], name) for step in steps]
            axes.plot(steps, [e[0] for e in found], color=colour, marker=marker)
            axes.vlines(steps, [e[1] for e in found], [e[2] for e in found], color=colour, linewidth=1.4)
        axes.set_xlabel("step")
        axes.locator_params(axis="x", nbins=4, integer=True)
    handles = [
        Line2D(
            [], [], color=COLOURS[i % len(COLOURS)], marker=MARKERS[i % len(MARKERS)], label=_line_name(key, several)
        )
        for i, (key, _) in enumerate(lines)
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(4, len(handles)))
    return figure


def _band(
    axes: Axes, positions: Sequence[int], frames: Sequence[pd.DataFrame], name: str, colour: str, line: Any
) -> None:
    """The mean of ``name`` in each frame at its position, with its interval."""
    if not frames:
        return
    found = np.array([_estimate(frame, name) for frame in frames])
    axes.plot(positions, found[:, 0], color=colour, linestyle=line, linewidth=1.8)
    axes.fill_between(positions, found[:, 1], found[:, 2], color=colour, alpha=0.15, linewidth=0)


def _estimate(rows: pd.DataFrame, name: str) -> tuple[float, float, float]:
    """Mean over prompts of the mean over responses, with its 95% interval."""
    means = rows.groupby("prompt_id")[name].mean().dropna().to_numpy(dtype=np.float64)
    if not len(means):
        return (np.nan, np.nan, np.nan)
    (estimate,) = mean_estimates(torch.from_numpy(means.copy())[:, None], DRAWS)
    return estimate.value, estimate.low, estimate.high


def _histograms(top: Axes, right: Axes, rows: pd.DataFrame, x: str, y: str, edges: Sequence[Any], colour: str) -> None:
    style: dict[str, Any] = {"color": colour, "alpha": 0.45, "linewidth": 0}
    if len(rows):
        top.hist(rows[x].dropna(), bins=edges[0], **style)
        right.hist(rows[y].dropna(), bins=edges[1], orientation="horizontal", **style)


def _edges(values: pd.Series) -> Any:
    """Edges of the bins that all histograms of a metric share."""
    found = values.to_numpy(dtype=np.float64)
    return np.histogram_bin_edges(found[np.isfinite(found)], bins=24)


def _correlation_line(correlations: pd.DataFrame, x: str, y: str) -> str:
    found = correlations[(correlations["x"] == x) & (correlations["y"] == y) & (correlations["responses"] == "all")]
    if not len(found):
        return ""
    row = found.iloc[0]
    interval = f" [{row['pearson_low']:.2f}, {row['pearson_high']:.2f}]" if np.isfinite(row["pearson_low"]) else ""
    return f"r = {row['pearson']:.2f}{interval}, ρ = {row['spearman']:.2f}"


def _panels(figure: Figure, names: Sequence[str], width: float, height: float) -> Iterator[tuple[Axes, str]]:
    """An axes for each name, under it as title, five beside each other."""
    columns = min(5, len(names))
    lines = -(-len(names) // columns)
    figure.set_size_inches(width * columns + 0.4, height * lines + 0.8)
    axes = list(figure.subplots(lines, columns, squeeze=False).flat)
    for panel, name in zip(axes, names, strict=False):
        panel.set_title(name, fontsize=9)
        yield panel, name
    for panel in axes[len(names) :]:
        panel.set_visible(False)


def _finish(figure: Figure, title: str, legend: bool = True, lines: bool = True) -> None:
    """Title and legend; ``lines``: the figure has lines, otherwise points."""
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=12)
    if legend:
        handles = [
            Line2D([], [], color=own, linestyle=line, label=f"{name} responses")
            if lines
            else Line2D(
                [],
                [],
                color=own,
                marker=m,
                linestyle="",
                markerfacecolor=own if name == "correct" else "none",
                label=f"{name} responses",
            )
            for name, _, own, m, line in VERDICTS
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=2, handlelength=3)


def _line_name(key: Sequence[object], several: bool) -> str:
    run, benchmark, temperature = key
    return f"{run} on {benchmark}" + (f", T={temperature:g}" if several else "")
