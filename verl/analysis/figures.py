"""Which figures an analysis has: exploration against exploitation, correct against wrong, along the response, layer by
layer, and over checkpoints."""

import re
from collections.abc import Iterator

import pandas as pd

from verl.analysis.drawing import (
    MIN_ALIVE,
    checkpoint_figure,
    correctness_figure,
    course_figure,
    layer_figure,
    scatter_figure,
)
from verl.analysis.sheets import MODEL, of_model
from verl.config.analysis import AnalysisConfig
from verl.evaluation.report.figures import NamedFigure
from verl.evaluation.results import safe_name

RESPONSE_POINTS = "Each point is a response. r: Pearson, with its 95% interval over prompts; ρ: Spearman."
POINTS = "Each point is a prompt, with all responses to it; colour: the share of them that is correct."


def draw_figures(
    config: AnalysisConfig, responses: pd.DataFrame, prompts: pd.DataFrame, courses: pd.DataFrame, table: pd.DataFrame
) -> Iterator[NamedFigure]:
    """Every figure that the tables have data for; ``table`` holds the correlations."""
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
                yield NamedFigure(f"scatter_{kind}s_{name}", figure, caption)
        metrics = [c for c in part.columns if c in _panel_columns(config) and part[c].nunique() > 1]
        caption = "Box: middle half and median; whiskers: 5th to 95th percentile of responses."
        if metrics:
            yield NamedFigure(f"correctness_{name}", correctness_figure(part, metrics, title), caption)
        along = [c for c in courses.columns if c not in (*MODEL, "prompt_id", "rollout_id", "correctness", "tokens")]
        caption = (
            f"Mean over the responses that continue, while there are at least {MIN_ALIVE}; "
            "band: 95% interval over prompts."
        )
        yield NamedFigure(f"along_{name}", course_figure(of_model(courses, place), along, title), caption)
        if len(config.calculator.layers) > 1:
            yield NamedFigure(f"layers_{name}", layer_figure(config, part, title), over_prompts.format("band"))
    if responses["step"].nunique() > 1:
        shown = {*_panel_columns(config), "correctness"}
        metrics = [c for c in responses.columns if c in shown and responses[c].nunique() > 1]
        yield NamedFigure("checkpoints", checkpoint_figure(responses, metrics), over_prompts.format("bar"))


def _panel_columns(config: AnalysisConfig) -> list[str]:
    """A response's numbers that get a panel: those of ``analysis.layer`` and of its tokens."""
    tokens = ("avg_log_probs", "avg_logits_entropy", "response_entropy", "response_confidence")
    return [*config.calculator.metric_names, *tokens, "n_gram_repetition_rate", "response_length", "reflection_words"]
