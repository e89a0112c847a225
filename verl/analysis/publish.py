"""Writes the output of an analysis: tables, correlations, figures and the HTML page."""

import math
from collections.abc import Iterator
from pathlib import Path

import pandas as pd

from verl.analysis.correlations import correlation_table
from verl.analysis.drawing import write_figures
from verl.analysis.early import early_table
from verl.analysis.figures import draw_figures
from verl.analysis.sheets import (
    CORRELATION_SHEET,
    EARLY_SHEET,
    MODEL,
    PLACE,
    PROMPT_SHEET,
    RESPONSE_SHEET,
    TEXTS,
    of_model,
    prompt_columns,
    response_columns,
    write_parquet,
    write_tables,
)
from verl.config.analysis import AnalysisConfig
from verl.evaluation.report.publish import Figures, record
from verl.run.display import RunDisplay
from verl.utils.files import replace_text
from verl_pages.analysis import build_page

UPLOADED = ("index.html", "analysis.xlsx")
"""Files to upload to the wandb run."""

MANY = 0.02
"""Minimum share of responses without acceleration that triggers a warning."""


def publish(
    folder: Path,
    config: AnalysisConfig,
    display: RunDisplay,
    responses: pd.DataFrame,
    prompts: pd.DataFrame,
    courses: pd.DataFrame,
) -> None:
    """Write all results to ``folder``, with ``summary.json`` last, and log mean metrics to the trackers."""
    options = config.analysis
    display.say(f"correlating {len(responses)} responses to {len(prompts)} prompts")
    correlations = correlate_all(config, responses, prompts)
    early = early_table(config, courses if options.per_response else courses[:0])
    tables = {
        RESPONSE_SHEET: responses if options.per_response else responses[:0],
        PROMPT_SHEET: prompts if options.per_prompt else prompts[:0],
        CORRELATION_SHEET: correlations,
        EARLY_SHEET: early,
    }
    workbook = write_tables(folder, tables)
    warnings = _too_short(config, responses)
    display.say("drawing the figures")
    write_parquet(folder / "courses.parquet", courses)
    figures = write_figures(folder / "figures", draw_figures(config, responses, prompts, courses, correlations, early))
    models = ", ".join(f"{run}@{step}" for run, step in responses.groupby(["run", "step"], sort=False).groups)
    lines = [
        f"{models} on {', '.join(responses['benchmark'].unique())}: {config.n_sampling} responses to each prompt, "
        f"{len(prompts)} prompts in all, rank metrics of layer {options.layer}, a prefix every "
        f"{config.calculator.diff_stride} tokens.",
        *warnings,
        "Every number is in analysis.xlsx, and in the parquet files beside this page.",
    ]
    title = f"Exploration and exploitation: {config.trainer.experiment_name}"
    replace_text(folder / "index.html", build_page(title, lines, folder / "figures", figures, correlations))
    record(folder, config, _mean_figures(config, responses, prompts), display.errors, UPLOADED)
    for warning in warnings:
        display.say(f"warning: {warning}")
    display.say(f"page: {folder}/index.html")
    display.say(f"tables: {workbook}, and as parquet beside it")


def _too_short(config: AnalysisConfig, responses: pd.DataFrame) -> list[str]:
    """Return a warning if many responses are too short to measure acceleration, which is then reported as 0."""
    calculator = config.calculator
    if not calculator.compute_diff:
        return []
    share = float((responses[f"{calculator.base_names[0]} diff 2"] == 0).mean())
    if share < MANY:
        return []
    return [
        f"{share:.0%} of the responses have fewer than three prefixes, one every {calculator.diff_stride} tokens: "
        "their acceleration is 0 by definition, and correlations with it say little. Lower calculator.diff_stride."
    ]


def _mean_figures(config: AnalysisConfig, responses: pd.DataFrame, prompts: pd.DataFrame) -> Iterator[Figures]:
    """Yield the mean of every metric over prompts for each model and benchmark."""
    names = prompt_columns(config) if config.analysis.per_prompt else []
    compared = [name for name in names if not name.endswith((" Avg", "_avg"))]
    several = responses["temperature"].nunique() > 1
    for (run, step, benchmark, temperature), part in responses.groupby(MODEL, sort=False):
        means = part.groupby("prompt_id")[response_columns(config)].mean().mean()
        of_prompts = of_model(prompts, (run, step, benchmark, temperature))[compared].mean()
        values = {name: float(v) for name, v in {**means, **of_prompts}.items() if math.isfinite(v)}
        yield run, int(step), f" T={temperature:g}" if several else "", benchmark, values


def correlate_all(config: AnalysisConfig, responses: pd.DataFrame, prompts: pd.DataFrame) -> pd.DataFrame:
    """Correlate the configured pairs of metrics, and each metric with the outcome, per model and benchmark."""
    options, parts = config.analysis, []
    for kind, wanted, table, pairs, suffix, correct in (
        ("response", options.per_response, responses, options.response_pairs, "", "correctness"),
        ("prompt", options.per_prompt, prompts, options.prompt_pairs, "_avg", None),
    ):
        outcome, length = options.outcome + suffix, "response_length" + suffix
        with_outcome = [(name, outcome) for name in table.columns if name not in (*PLACE, *TEXTS, outcome)]
        configured = list(dict.fromkeys((x, y) for x, y in pairs))
        for place, part in table.groupby(MODEL, sort=False) if wanted else ():
            # The outcome hardly varies among correct responses, so correlate it over all responses only.
            for columns, groups in ((configured, correct), (with_outcome, None)):
                rows = correlation_table(part, columns, length, groups, options.draws, config.seed)
                keys = dict(zip(MODEL, place, strict=True)) | {"of": kind}
                parts.append(pd.concat([pd.DataFrame([keys] * len(rows)), rows], axis=1))
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()
