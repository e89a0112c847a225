"""Which figures an analysis has, and their files: exploration against exploitation, correct against wrong, along the
response, layer by layer, and over checkpoints."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from verl.analysis.drawing import (
    MIN_ALIVE,
    checkpoint_figure,
    correctness_figure,
    course_figure,
    layer_figure,
    scatter_figure,
)
from verl.config.analysis import AnalysisConfig
from verl.evaluation.report.plots import STYLE
from verl.evaluation.results import safe_name

MODEL = ["run", "step", "benchmark", "temperature"]
"""Columns that tell one model on one benchmark from another."""


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
    # Names of files may hold dollar signs, which are no formulas.
    with rc_context(STYLE | {"text.parse_math": False}):
        for found in figures:
            FigureCanvasAgg(found.figure)
            found.figure.savefig(folder / f"{found.name}.png")
            # Laid out once for both files: that takes as long as drawing.
            found.figure.set_layout_engine("none")
            found.figure.savefig(folder / f"{found.name}.svg", metadata={"Date": None})
            written.append((found.name, found.caption))
    return written


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
