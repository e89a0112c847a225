"""Draws the plots of an analysis.

The plots compare exploration with exploitation and correct with wrong responses, and show metrics by token position, by
layer and by checkpoint.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from verl.analysis.drawing import VERDICTS, NamedFigure, VerdictStyle, bottom_legend, heading, line_style, panels
from verl.analysis.sheets import MODEL, column, of_model
from verl.config.analysis import AnalysisConfig
from verl.evaluation.results import safe_name
from verl.evaluation.statistics import intervals, resampled
from verl_pages.names import metric_name

MAX_POINTS = 2000
"""Maximum number of points in a scatter plot. Larger datasets are subsampled at random."""

MIN_ALIVE = 5
"""Minimum number of responses that extend beyond each plotted token position."""

DRAWS = 500
"""Number of bootstrap draws for each interval band."""

LINES = [{"color": v.colour, "linestyle": v.line} for v in VERDICTS]

KINDS = {"auc": "all pairs", "within": "pairs within a prompt"}
"""Maps each AUC column to the pairs of correct and wrong responses that it compares."""

RESPONSE_POINTS = "Each point is a response. r: Pearson, with its 95% interval over prompts; ρ: Spearman."
EARLY = (
    "Probability that a correct response has a higher value of the metric than a wrong one, to any prompt (upper row) "
    "or to the same one (lower row); ties count half. Band: 95% interval over prompts."
)
POINTS = "Each point is a prompt, with all responses to it; colour: the share of them that is correct."


def draw_figures(
    config: AnalysisConfig,
    responses: pd.DataFrame,
    prompts: pd.DataFrame,
    courses: pd.DataFrame,
    table: pd.DataFrame,
    early: pd.DataFrame,
) -> Iterator[NamedFigure]:
    """Yield every figure for which the tables have data. ``table`` contains the correlations."""
    options = config.analysis
    over_prompts = "Mean over prompts of their responses' mean; {}: 95% interval over prompts."
    for (run, step, benchmark, temperature), part in responses.groupby(MODEL, sort=False):
        place = (run, step, benchmark, temperature)
        title = f"{run}@{step} on {benchmark}, T={temperature:g}"
        name = safe_name(re.sub(r"\s", "_", f"{run}@{step}_{benchmark}_T{temperature:g}"))
        for rows, kind, pairs, wanted, colour, caption in (
            (part, "response", options.response_pairs, options.per_response, "correctness", RESPONSE_POINTS),
            (of_model(prompts, place), "prompt", options.prompt_pairs, options.per_prompt, "correctness_avg", POINTS),
        ):
            if wanted and pairs:
                of_kind = table[table["of"] == kind] if len(table) else table
                figure = scatter_figure(rows, pairs, of_model(of_kind, place), colour, title)
                yield f"scatter_{kind}s_{name}", figure, caption
        metrics = [c for c in part.columns if c in _panel_columns(config) and part[c].nunique() > 1]
        caption = "Box: middle half and median; whiskers: 5th to 95th percentile of responses."
        if metrics:
            yield f"correctness_{name}", correctness_figure(part, metrics, title), caption
        along = [c for c in courses.columns if c not in (*MODEL, "prompt_id", "rollout_id", "correctness", "tokens")]
        caption = (
            f"Mean over the responses that continue, while there are at least {MIN_ALIVE}; "
            "band: 95% interval over prompts."
        )
        yield f"along_{name}", course_figure(of_model(courses, place), along, title), caption
        if len(rows := of_model(early, place)):
            yield f"early_{name}", early_figure(rows, title), EARLY
        if len(config.calculator.layers) > 1:
            yield f"layers_{name}", layer_figure(config, part, title), over_prompts.format("band")
    if responses["step"].nunique() > 1:
        shown = {*_panel_columns(config), "correctness"}
        metrics = [c for c in responses.columns if c in shown and responses[c].nunique() > 1]
        yield "checkpoints", checkpoint_figure(responses, metrics), over_prompts.format("bar")


def _panel_columns(config: AnalysisConfig) -> list[str]:
    """Return the response metrics shown in panels: the rank metrics of ``analysis.layer`` and the token metrics."""
    tokens = ("avg_log_probs", "avg_logits_entropy", "response_entropy", "response_confidence")
    return [*config.calculator.metric_names, *tokens, "n_gram_repetition_rate", "response_length", "reflection_words"]


def scatter_figure(
    rows: pd.DataFrame, pairs: Sequence[Sequence[str]], correlations: pd.DataFrame, colour: str, title: str
) -> Figure:
    """Draw exploration (x) against exploitation (y) for each pair, with marginal histograms."""
    figure = Figure(figsize=(4.8, 4.3 * len(pairs) + 0.7), layout="constrained")
    points = rows.sample(MAX_POINTS, random_state=0) if len(rows) > MAX_POINTS else rows
    by_verdict = colour == "correctness"
    for part, (x, y) in zip(figure.subfigures(len(pairs), 1, squeeze=False).flat, pairs, strict=True):
        grid = part.add_gridspec(2, 2, width_ratios=(5, 1), height_ratios=(1, 5), wspace=0.04, hspace=0.04)
        axes = part.add_subplot(grid[1, 0])
        top, right = part.add_subplot(grid[0, 0], sharex=axes), part.add_subplot(grid[1, 1], sharey=axes)
        drawn = None
        columns = [rows[name].to_numpy(dtype=np.float64) for name in (x, y)]
        edges = [np.histogram_bin_edges(values[np.isfinite(values)], bins=24) for values in columns]
        # Draw the rarer verdict on top.
        verdicts = sorted(VERDICTS, key=lambda verdict: -int((points[colour] == verdict.correctness).sum()))
        for verdict in verdicts if by_verdict else ():
            of = points[points[colour] == verdict.correctness]
            style = {"facecolors": verdict.fill, "edgecolors": verdict.colour, "marker": verdict.marker}
            axes.scatter(of[x], of[y], s=14, alpha=0.55, linewidths=0.8, **style)
            _histograms(top, right, rows[rows[colour] == verdict.correctness], x, y, edges, verdict.colour)
        if not by_verdict:
            drawn = axes.scatter(points[x], points[y], s=18, c=points[colour], cmap="cividis", vmin=0, vmax=1)
            _histograms(top, right, rows, x, y, edges, "#4d4d4d")
        for margin in (top, right):
            margin.axis("off")
        axes.set_xlabel(f"{metric_name(x)}  (exploration)")
        axes.set_ylabel(f"{metric_name(y)}  (exploitation)")
        top.set_title(_correlation_line(correlations, x, y), fontsize=8.5, fontweight="normal")
        if drawn is not None:
            part.colorbar(drawn, ax=right, label=metric_name(colour), location="right")
    heading(figure, title)
    if by_verdict:
        looks = [{"color": v.colour, "marker": v.marker, "markerfacecolor": v.fill, "linestyle": ""} for v in VERDICTS]
        _verdict_legend(figure, looks)
    return figure


def correctness_figure(rows: pd.DataFrame, metrics: Sequence[str], title: str) -> Figure:
    """Draw the distribution of each metric for correct and wrong responses."""
    figure = Figure(layout="constrained")
    for axes, name in panels(figure, metrics, 2.4, 1.9):
        for place, verdict in enumerate(VERDICTS):
            values = rows.loc[rows["correctness"] == verdict.correctness, name].dropna()
            line = {"color": verdict.colour, "linewidth": 1.4}
            axes.boxplot(
                [values],
                positions=[1 - place],
                orientation="horizontal",
                whis=(5, 95),
                widths=0.6,
                showfliers=False,
                manage_ticks=False,
                boxprops=line,
                medianprops=line | {"linewidth": 2.4},
                whiskerprops=line,
                capprops=line,
            )
        axes.set_ylim(-0.5, 1.5)
        axes.set_yticks([1, 0], [verdict.name for verdict in VERDICTS])
        axes.grid(axis="y", visible=False)
        axes.locator_params(axis="x", nbins=4)
    heading(figure, title)
    return figure


def course_figure(courses: pd.DataFrame, metrics: Sequence[str], title: str) -> Figure:
    """Draw each metric by token position, for correct and wrong responses."""
    figure = Figure(layout="constrained")
    # The last point of each response is at its own length; keep only the positions that responses share.
    whole = courses.groupby(["prompt_id", "rollout_id"])["tokens"].transform("max")
    shared = courses[courses["tokens"] < whole]
    for axes, name in panels(figure, metrics, 3.0, 2.3):
        for verdict in VERDICTS:
            groups = shared[shared["correctness"] == verdict.correctness].groupby("tokens")
            alive = {int(tokens): part for tokens, part in groups if part[name].count() >= MIN_ALIVE}
            _band(axes, list(alive), [(part, name) for part in alive.values()], verdict)
        axes.set_xlabel("tokens")
    heading(figure, title)
    _verdict_legend(figure, LINES)
    return figure


def early_figure(table: pd.DataFrame, title: str) -> Figure:
    """Draw the AUC of each metric as a predictor of correctness, by share of tokens and by token position."""
    figure = Figure(layout="constrained")
    # The first points lack the metrics that need several prefixes.
    names = list(dict.fromkeys([*table.loc[table["at"] == 1.0, "metric"], *table["metric"]]))
    ends = table[[f"{of}{end}" for of in KINDS for end in ("_low", "_high")]]
    lowest, highest = np.nanmin(ends, initial=0.45), np.nanmax(ends, initial=0.55)
    views = {f"{kind}, by {by}": (of, by) for of, kind in KINDS.items() for by in ("share", "position")}
    for axes, view in panels(figure, list(views), 3.6, 2.8):
        of, by = views[view]
        for number, name in enumerate(names):
            rows = table[(table["by"] == by) & (table["metric"] == name)]
            style = line_style(number)
            axes.plot(rows["at"], rows[of], markersize=4, **style)
            axes.fill_between(rows["at"], rows[f"{of}_low"], rows[f"{of}_high"], color=style["color"], alpha=0.1)
        axes.axhline(0.5, color="#4d4d4d", linewidth=0.8)
        axes.set_xlabel("share of the tokens" if by == "share" else "tokens, of responses that are longer")
        axes.set_ylabel("AUC")
        axes.set_ylim(lowest - 0.02, highest + 0.02)
        positions = sorted(set(table.loc[table["by"] == "position", "at"]))
        if by == "position" and positions:
            axes.set_xscale("log", base=2)
            axes.set_xticks(positions, [f"{at:g}" for at in positions])
    heading(figure, title)
    bottom_legend(figure, [Line2D([], [], label=metric_name(n), **line_style(i)) for i, n in enumerate(names)])
    return figure


def layer_figure(config: AnalysisConfig, rows: pd.DataFrame, title: str) -> Figure:
    """Draw each rank metric by layer, for correct and wrong responses."""
    layers = config.calculator.layers
    # Sort from the first layer to the last, regardless of their order in the config.
    places = sorted(range(len(layers)), key=lambda place: (layers[place] < 0, layers[place]))
    figure = Figure(layout="constrained")
    for axes, name in panels(figure, config.calculator.metric_names, 3.0, 2.3):
        for verdict in VERDICTS:
            part = rows[rows["correctness"] == verdict.correctness]
            frames = [(part, column(config, place, name)) for place in places]
            _band(axes, range(len(layers)), frames if len(part) else [], verdict)
        axes.set_xticks(range(len(layers)), [str(layers[place]) for place in places])
        axes.set_xlabel("layer")
    heading(figure, title)
    _verdict_legend(figure, LINES)
    return figure


def checkpoint_figure(responses: pd.DataFrame, metrics: Sequence[str]) -> Figure:
    """Draw the mean of each metric over training steps, with one line per run, benchmark and temperature."""
    figure = Figure(layout="constrained")
    lines = list(responses.groupby(["run", "benchmark", "temperature"], sort=False))
    for axes, name in panels(figure, metrics, 2.4, 2.1):
        for number, (_, part) in enumerate(lines):
            style = line_style(number)
            by_step = part.groupby("step")
            steps = list(by_step.groups)
            means, low, high = np.array([_estimate(rows, name) for _, rows in by_step]).T
            axes.plot(steps, means, **style)
            axes.vlines(steps, low, high, color=style["color"], linewidth=1.4)
        axes.set_xlabel("step")
        axes.locator_params(axis="x", nbins=4, integer=True)
    several = responses["temperature"].nunique() > 1
    names = [f"{run} on {name}" + (f", T={heat:g}" if several else "") for (run, name, heat), _ in lines]
    bottom_legend(figure, [Line2D([], [], label=name, **line_style(i)) for i, name in enumerate(names)])
    return figure


def _band(
    axes: Axes, positions: Sequence[int], frames: Sequence[tuple[pd.DataFrame, str]], verdict: VerdictStyle
) -> None:
    """Plot the mean of each frame's metric against ``positions``, with an interval band."""
    if frames:
        means, low, high = np.array([_estimate(frame, name) for frame, name in frames]).T
        axes.plot(positions, means, color=verdict.colour, linestyle=verdict.line, linewidth=1.8)
        axes.fill_between(positions, low, high, color=verdict.colour, alpha=0.15, linewidth=0)


def _estimate(rows: pd.DataFrame, name: str) -> tuple[float, float, float]:
    """Return the mean of the per-prompt means and its 95% interval."""
    means = rows.groupby("prompt_id")[[name]].mean().dropna()
    if not len(means):
        return (np.nan, np.nan, np.nan)
    value, low, high = intervals([resampled(means, draws=DRAWS)]).values()
    return value, low, high


def _histograms(top: Axes, right: Axes, rows: pd.DataFrame, x: str, y: str, edges: Sequence[Any], colour: str) -> None:
    style: dict[str, Any] = {"color": colour, "alpha": 0.45, "linewidth": 0}
    if len(rows):
        top.hist(rows[x].dropna(), bins=edges[0], **style)
        right.hist(rows[y].dropna(), bins=edges[1], orientation="horizontal", **style)


def _correlation_line(correlations: pd.DataFrame, x: str, y: str) -> str:
    found = correlations[(correlations["x"] == x) & (correlations["y"] == y) & (correlations["responses"] == "all")]
    if not len(found):
        return ""
    row = found.iloc[0]
    interval = f" [{row['pearson_low']:.2f}, {row['pearson_high']:.2f}]" if np.isfinite(row["pearson_low"]) else ""
    return f"r = {row['pearson']:.2f}{interval}, ρ = {row['spearman']:.2f}"


def _verdict_legend(figure: Figure, looks: Sequence[dict[str, Any]]) -> None:
    """Add a legend for correct and wrong responses with the line styles ``looks``."""
    pairs = zip(VERDICTS, looks, strict=True)
    bottom_legend(figure, [Line2D([], [], label=f"{verdict.name} responses", **look) for verdict, look in pairs])
