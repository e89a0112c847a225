"""What an analysis leaves behind: tables, correlations, figures, the page."""

from pathlib import Path

import pandas as pd

from verl.analysis.correlations import correlation_table
from verl.analysis.figures import draw_figures, write_figures
from verl.analysis.page import build_page
from verl.analysis.sheets import (
    CORRELATION_SHEET,
    PLACE,
    PROMPT_SHEET,
    RESPONSE_SHEET,
    TEXTS,
    write_tables,
)
from verl.config.analysis import AnalysisConfig
from verl.evaluation.progress import EvaluationDisplay
from verl.utils.files import replace_text, replacing

MODEL = ("run", "step", "benchmark", "temperature")
"""Columns that tell one model on one benchmark from another: correlations are within."""


def publish(
    folder: Path,
    config: AnalysisConfig,
    display: EvaluationDisplay,
    responses: pd.DataFrame,
    prompts: pd.DataFrame,
    courses: pd.DataFrame,
) -> None:
    """Write everything into ``folder`` and say where it is."""
    options = config.analysis
    correlations = correlate_all(config, responses, prompts)
    tables = {
        RESPONSE_SHEET: responses if options.per_response else responses[:0],
        PROMPT_SHEET: prompts if options.per_prompt else prompts[:0],
        CORRELATION_SHEET: correlations,
    }
    workbook = write_tables(folder, tables)
    with replacing(folder / "courses.parquet") as temporary:
        courses.to_parquet(temporary, compression="zstd", index=False)
    figures = write_figures(folder / "figures", draw_figures(config, responses, prompts, courses, correlations))
    models = ", ".join(f"{run}@{step}" for run, step in responses.groupby(["run", "step"], sort=False).groups)
    lines = [
        f"{models} on {', '.join(responses['benchmark'].unique())}: {config.n_sampling} responses to each prompt, "
        f"{len(prompts)} prompts in all, rank metrics of layer {options.layer}, a prefix every "
        f"{config.calculator.diff_stride} tokens.",
        "Every number is in analysis.xlsx, and in the parquet files beside this page.",
    ]
    title = f"Exploration and exploitation: {config.trainer.experiment_name}"
    replace_text(folder / "index.html", build_page(title, lines, folder / "figures", figures, correlations))
    display.say(f"page: {folder}/index.html")
    display.say(f"tables: {workbook}, and as parquet beside it")


def correlate_all(config: AnalysisConfig, responses: pd.DataFrame, prompts: pd.DataFrame) -> pd.DataFrame:
    """Correlations of the configured pairs, and of every metric with the outcome, for each model and benchmark."""
    options, parts = config.analysis, []
    for table, pairs, outcome, length, correct in (
        (responses, options.response_pairs, options.outcome, "response_length", "correctness"),
        (prompts, options.prompt_pairs, f"{options.outcome}_avg", "response_length_avg", None),
    ):
        rows_of = "response" if correct else "prompt"
        if not (options.per_response if correct else options.per_prompt):
            continue
        metrics = [name for name in table.columns if name not in (*PLACE, *TEXTS, outcome)]
        own = list(dict.fromkeys((x, y) for x, y in pairs))
        with_outcome = [(name, outcome) for name in metrics]
        for place, part in table.groupby(list(MODEL), sort=False):
            keys = dict(zip(MODEL, place, strict=True)) | {"of": rows_of}
            # Among correct responses alone the outcome hardly varies.
            for wanted, groups in ((own, correct), (with_outcome, None)):
                found = correlation_table(part, wanted, length, groups, options.draws, config.seed)
                parts.append(pd.concat([pd.DataFrame([keys] * len(found)), found], axis=1))
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()
