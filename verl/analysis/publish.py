"""What an analysis leaves behind: tables, correlations, figures, the page."""

import math
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from verl.analysis.correlations import correlation_table
from verl.analysis.figures import draw_figures, write_figures
from verl.analysis.sheets import (
    CORRELATION_SHEET,
    PLACE,
    PROMPT_SHEET,
    RESPONSE_SHEET,
    TEXTS,
    prompt_columns,
    response_columns,
    write_tables,
)
from verl.config.analysis import AnalysisConfig
from verl.evaluation.progress import EvaluationDisplay
from verl.evaluation.report.publish import record
from verl.utils.files import replace_text, replacing
from verl_pages.analysis import build_page

MODEL = ("run", "step", "benchmark", "temperature")
"""Columns that tell one model on one benchmark from another: correlations are within."""

UPLOADED = ("index.html", "analysis.xlsx")
"""Files that are added to the tracker's run on wandb."""

MANY = 0.02
"""Share of responses without acceleration that is worth a warning."""


def publish(
    folder: Path,
    config: AnalysisConfig,
    display: EvaluationDisplay,
    failed: Sequence[str],
    responses: pd.DataFrame,
    prompts: pd.DataFrame,
    courses: pd.DataFrame,
) -> None:
    """Write everything into ``folder`` and log the figures to the trackers; ``summary.json`` comes last.

    ``failed``: a line for each model or benchmark that failed.
    """
    options = config.analysis
    display.say(f"correlating {len(responses)} responses to {len(prompts)} prompts")
    correlations = correlate_all(config, responses, prompts)
    tables = {
        RESPONSE_SHEET: responses if options.per_response else responses[:0],
        PROMPT_SHEET: prompts if options.per_prompt else prompts[:0],
        CORRELATION_SHEET: correlations,
    }
    workbook = write_tables(folder, tables)
    display.say("drawing the figures")
    with replacing(folder / "courses.parquet") as temporary:
        courses.to_parquet(temporary, compression="zstd", index=False)
    figures = write_figures(folder / "figures", draw_figures(config, responses, prompts, courses, correlations))
    models = ", ".join(f"{run}@{step}" for run, step in responses.groupby(["run", "step"], sort=False).groups)
    lines = [
        f"{models} on {', '.join(responses['benchmark'].unique())}: {config.n_sampling} responses to each prompt, "
        f"{len(prompts)} prompts in all, rank metrics of layer {options.layer}, a prefix every "
        f"{config.calculator.diff_stride} tokens.",
        *_too_short(config, responses),
        "Every number is in analysis.xlsx, and in the parquet files beside this page.",
    ]
    title = f"Exploration and exploitation: {config.trainer.experiment_name}"
    replace_text(folder / "index.html", build_page(title, lines, folder / "figures", figures, correlations))
    figures_by_label, by_step = _figures(config, responses, prompts)
    record(folder, config, by_step, {"figures": figures_by_label, "failed": list(failed)}, UPLOADED)
    for line in _too_short(config, responses):
        display.say(f"warning: {line}")
    display.say(f"page: {folder}/index.html")
    display.say(f"tables: {workbook}, and as parquet beside it")


def _too_short(config: AnalysisConfig, responses: pd.DataFrame) -> list[str]:
    """A sentence on responses without acceleration, whose zeros are no measurements; none if they are few."""
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


def _figures(
    config: AnalysisConfig, responses: pd.DataFrame, prompts: pd.DataFrame
) -> tuple[dict[str, dict[str, dict[str, float]]], dict[int, dict[str, float]]]:
    """The mean of every metric over prompts: by model and benchmark for the summary, and by step for trackers."""
    own = prompt_columns(config) if config.analysis.per_prompt else []
    compared = [name for name in own if not name.endswith((" Avg", "_avg"))]
    several = responses["temperature"].nunique() > 1
    by_label: dict[str, dict[str, dict[str, float]]] = {}
    by_step: dict[int, dict[str, float]] = {}
    for place, part in responses.groupby(list(MODEL), sort=False):
        run, step, benchmark, temperature = place
        means = part.groupby("prompt_id")[response_columns(config)].mean().mean()
        of_prompts = prompts[(prompts[list(MODEL)] == pd.Series(dict(zip(MODEL, place, strict=True)))).all(axis=1)]
        found = {**means.to_dict(), **of_prompts[compared].mean().to_dict()}
        found = {name: float(value) for name, value in found.items() if math.isfinite(value)}
        suffix = f" T={temperature:g}" if several else ""
        by_label.setdefault(f"{run}@{step}{suffix}", {})[benchmark] = found
        metrics = by_step.setdefault(int(step), {})
        metrics |= {f"{run}{suffix}/{benchmark}/{name}": value for name, value in found.items()}
    return by_label, dict(sorted(by_step.items()))


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
