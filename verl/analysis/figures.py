"""The figures of an analysis: exploration against exploitation, correct against wrong, along the response, layer by
layer, and over checkpoints."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from verl.analysis.sheets import column
from verl.config.analysis import AnalysisConfig
from verl.evaluation.report.plots import CORRECT_COLOUR, MARKERS, STYLE, WRONG_COLOUR
from verl.evaluation.results import safe_name
from verl.evaluation.statistics.bootstrap import mean_estimates
from verl.report.colours import COLOURS

MODEL = ["run", "step", "benchmark", "temperature"]
"""Columns that tell one model on one benchmark from another."""

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


@dataclass(frozen=True)
class NamedFigure:
    """A figure with its file name and the sentence below it."""

    name: str
    figure: Figure
    caption: str


def draw_figures(
    config: AnalysisConfig, responses: pd.DataFrame, prompts: pd.DataFrame, courses: pd.DataFrame, table: pd.DataFrame
) -> Iterator[NamedFigure]:
    """Every figure that the tables have data for; ``table`` holds the correlations."""
    options = config.analysis
    for place, part in responses.groupby(MODEL, sort=False):
        title, name = _title(place), _file(place)
        of_prompts = prompts[_is(prompts, place)]
        found = table[_is(table, place)] if len(table) else table
        if options.per_response and options.response_pairs:
            caption = "Each point is a response. r: Pearson, with its 95% interval over prompts; ρ: Spearman."
            figure = scatter_figure(part, options.response_pairs, _of(found, "response"), "correctness", title)
            yield NamedFigure(f"scatter_responses_{name}", figure, caption)
        if options.per_prompt and options.prompt_pairs:
            caption = "Each point is a prompt, with all responses to it; colour: the share of them that is correct."
            figure = scatter_figure(of_prompts, options.prompt_pairs, _of(found, "prompt"), "correctness_avg", title)
            yield NamedFigure(f"scatter_prompts_{name}", figure, caption)
        metrics = [c for c in part.columns if c in _panel_columns(config) and part[c].nunique() > 1]
        caption = "Box: middle half and median; whiskers: 5th to 95th percentile of responses."
        if metrics:
            yield NamedFigure(f"correctness_{name}", correctness_figure(part, metrics, title), caption)
        along = [c for c in courses.columns if c not in (*MODEL, "prompt_id", "rollout_id", "correctness", "tokens")]
        caption = (
            "Mean over the responses that are still going on, while there are at least "
            f"{MIN_ALIVE}; band: 95% interval over prompts."
        )
        yield NamedFigure(f"along_{name}", course_figure(courses[_is(courses, place)], along, title), caption)
        if len(config.calculator.layers) > 1:
            caption = "Mean over prompts of their responses' mean; band: 95% interval over prompts."
            yield NamedFigure(f"layers_{name}", layer_figure(config, part, title), caption)
    if responses["step"].nunique() > 1:
        wanted = {*_panel_columns(config), "correctness"}
        metrics = [c for c in responses.columns if c in wanted and responses[c].nunique() > 1]
        caption = "Mean over prompts of their responses' mean; bar: 95% interval over prompts."
        yield NamedFigure("checkpoints", checkpoint_figure(responses, metrics), caption)


def write_figures(folder: Path, figures: Iterator[NamedFigure]) -> list[tuple[str, str]]:
    """Write each figure as SVG and PNG; their names and captions. Figures of an earlier analysis are removed."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in [*folder.glob("*.svg"), *folder.glob("*.png")]:
        old.unlink()
    written = []
    with rc_context(STYLE):
        for found in figures:
            FigureCanvasAgg(found.figure)
            found.figure.savefig(folder / f"{found.name}.svg", metadata={"Date": None})
            found.figure.savefig(folder / f"{found.name}.png")
            written.append((found.name, found.caption))
    return written


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
        for name, value, own, marker, _ in VERDICTS if by_verdict else ():
            of = points[points[colour] == value]
            fill = own if name == "correct" else "none"
            axes.scatter(of[x], of[y], s=14, marker=marker, facecolors=fill, edgecolors=own, alpha=0.55, linewidths=0.8)
            _histograms(top, right, rows[rows[colour] == value], x, y, own)
        if not by_verdict:
            drawn = axes.scatter(points[x], points[y], s=18, c=points[colour], cmap="cividis", vmin=0, vmax=1)
            _histograms(top, right, rows, x, y, "#4d4d4d")
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


def _histograms(top: Axes, right: Axes, rows: pd.DataFrame, x: str, y: str, colour: str) -> None:
    style: dict[str, Any] = {"bins": 24, "color": colour, "alpha": 0.45, "linewidth": 0}
    if len(rows):
        top.hist(rows[x].dropna(), **style)
        right.hist(rows[y].dropna(), orientation="horizontal", **style)


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


def _panel_columns(config: AnalysisConfig) -> list[str]:
    """A response's numbers that get a panel: those of ``analysis.layer`` and of its tokens."""
    tokens = ("avg_log_probs", "avg_logits_entropy", "response_entropy", "response_confidence")
    return [*config.calculator.metric_names, *tokens, "n_gram_repetition_rate", "response_length", "reflection_words"]


def _is(rows: pd.DataFrame, place: Sequence[object]) -> pd.Series:
    return (rows[MODEL] == pd.Series(dict(zip(MODEL, place, strict=True)))).all(axis=1)


def _of(correlations: pd.DataFrame, rows: str) -> pd.DataFrame:
    return correlations[correlations["of"] == rows] if len(correlations) else correlations


def _title(place: Sequence[object]) -> str:
    run, step, benchmark, temperature = place
    return f"{run}@{step} on {benchmark}, T={temperature:g}"


def _file(place: Sequence[object]) -> str:
    run, step, benchmark, temperature = place
    return safe_name(re.sub(r"\s", "_", f"{run}@{step}_{benchmark}_T{temperature:g}"))


def _line_name(key: Sequence[object], several: bool) -> str:
    run, benchmark, temperature = key
    return f"{run} on {benchmark}" + (f", T={temperature:g}" if several else "")
