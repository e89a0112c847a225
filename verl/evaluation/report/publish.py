"""Writes an evaluation's result files, tables and page, and logs its statistics to the trackers."""

import math
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import date
from pathlib import Path
from urllib.parse import quote

from verl.config.evaluation import EvaluationConfig
from verl.evaluation.report.page import make_page
from verl.evaluation.report.tables import csv_text, markdown, overview_table, sampling_text, terminal_table
from verl.evaluation.results import ENVIRONMENT, PROMPT_TOO_LONG, TaskResult, row_labels, write_result
from verl.evaluation.statistics import GROUPS, Key, Summary, summarise
from verl.evaluation.targets import Target
from verl.run.display import RunDisplay
from verl.run.tracking import Tracker, drop_records, write_summary
from verl.utils.files import replace_text

UPLOADED = ("index.html", "results.md", "results.csv")
"""Files to upload to the wandb run."""

COLUMNS_OF_LOGS = 140
"""Minimum table width in characters if stdout is not a terminal."""


Figures = tuple[str, int, str, str, Mapping[str, float]]
"""Run, step, label suffix, benchmark, and the checkpoint's statistics on the benchmark, keyed by name. The suffix, such
as `` T=0.6``, is empty if the checkpoint was evaluated at a single temperature."""


def publish(
    folder: Path,
    results: Sequence[TaskResult],
    config: EvaluationConfig,
    display: RunDisplay,
    targets: Collection[Target],
) -> None:
    """Write all results to ``folder``, log the statistics to the trackers, and print the table."""
    sampling, title = sampling_text(config, targets), config.trainer.experiment_name
    models = ", ".join(f"{target.label} is {target.path}" for target in targets)
    about = f"Evaluated on {date.today()}: {sampling}. Models: {models}."
    reports = {target.run: Path(target.folder, "report.html") for target in targets if target.folder}
    pages = [(run, quote(os.path.relpath(page, folder))) for run, page in reports.items() if page.is_file()]
    summary = write_results(folder, results, title, config.compare_to, config.seed, about, pages)
    tracked = tracked_figures(summary)
    figures = [
        (r.run, r.step, label.removeprefix(r.label), r.benchmark, tracked[r.benchmark, label])
        for r, label in zip(results, row_labels(results), strict=True)
    ]
    record(folder, config, figures, display.errors, UPLOADED)
    table = terminal_table(f"Evaluation (percent): {sampling}", overview_table(summary))
    console = display.console
    console.print(table, width=None if console.is_terminal else max(console.width, COLUMNS_OF_LOGS))
    display.say(f"page: {folder}/index.html")
    display.say(f"tables: {folder}/results.md, {folder}/results.csv")


def write_results(
    folder: Path,
    results: Sequence[TaskResult],
    title: str = "Evaluation",
    compare_to: str = "auto",
    seed: int = 0,
    about: str = "",
    pages: Sequence[tuple[str, str]] = (),
) -> Summary:
    """Write all results to ``folder`` and return their statistics.

    The files are ``results.md``, ``results.csv``, ``index.html`` and, for each result, ``results.json`` and
    ``samples.parquet``. These files replace those of earlier evaluations and depend only on the arguments. ``about``
    describes how the responses were sampled, and ``pages`` contains the name and relative page URL of each run.
    """
    summary = summarise(results, compare_to, seed)
    folder.mkdir(parents=True, exist_ok=True)
    rows = summary.table.to_dict("index")
    for result, label in zip(results, row_labels(results), strict=True):
        write_result(folder, result, rows[result.benchmark, label])
    replace_text(folder / "results.md", markdown(summary, title, about, pages))
    replace_text(folder / "results.csv", csv_text(summary))
    replace_text(folder / "index.html", make_page(summary, results, title, about, pages))
    return summary


def record(
    folder: Path,
    config: EvaluationConfig,
    figures: Iterable[Figures],
    failed: Sequence[str],
    uploaded: Sequence[str],
) -> None:
    """Write ``config.yaml`` and ``metrics.jsonl``, log to the trackers, and finally write ``summary.json``.

    Metrics such as ``<run>/<benchmark>/pass@1`` are logged per step, so that trackers show curves over training.

    Args:
        failed: One line for each model or benchmark that failed.
        uploaded: Files to upload to the wandb run.
    """
    by_label: dict[str, dict[str, Mapping[str, float]]] = {}
    by_step: dict[int, dict[str, float]] = {}
    for run, step, temperature, benchmark, values in figures:
        by_label.setdefault(f"{run}@{step}{temperature}", {})[benchmark] = values
        metrics = by_step.setdefault(step, {})
        metrics |= {f"{run}{temperature}/{benchmark}/{name}": value for name, value in values.items()}
    # Remove the records of earlier evaluations in the same folder.
    drop_records(folder, last_step=None)
    trainer = config.trainer
    tracker = Tracker(folder, trainer.logger, trainer.project_name, trainer.experiment_name, config)
    try:
        for step in sorted(by_step):
            tracker.log(step, by_step[step])
        write_summary(folder, {"seed": config.seed, "figures": by_label, "failed": list(failed)})
        if "wandb" in trainer.logger:
            # Import lazily, so that wandb is required only if it is used.
            import wandb

            for name in uploaded:
                wandb.save(str(folder / name), base_path=str(folder), policy="now")
    finally:
        tracker.close()


def tracked_figures(summary: Summary) -> dict[Key, dict[str, float]]:
    """Return the finite statistics of each checkpoint on each benchmark, keyed by their names in trackers."""
    names = {(column := f"{name}@{k}"): column for name in summary.figures for k in summary.ks}
    names |= {"mean_tokens": "response_length/mean", "truncation_rate": "response_length/clip_ratio"}
    names |= {"repetition_rate": "repetition_rate", f"reason_{PROMPT_TOO_LONG}": PROMPT_TOO_LONG}
    names |= {name: f"{name}/mean" for name in summary.table if name.startswith(ENVIRONMENT)}
    names |= {(mean := f"{name}/{group}"): f"{mean}/mean" for name in summary.metrics for group in GROUPS}
    return {
        key: {names[name]: value for name, value in row.items() if name in names and math.isfinite(value)}
        for key, row in summary.table.to_dict("index").items()
    }
