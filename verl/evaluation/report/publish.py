"""Results of an evaluation: files of every result, tables, the page, and the trackers' records."""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from verl.config.evaluation import EvaluationConfig
from verl.evaluation.failures import EvaluationDisplay
from verl.evaluation.report.page import make_page
from verl.evaluation.report.tables import csv_text, markdown, overview_table, terminal_table
from verl.evaluation.results import PROMPT_TOO_LONG, TaskResult, row_labels, write_result
from verl.evaluation.statistics import GROUPS, Key, Summary, summarise
from verl.run.tracking import Tracker, drop_records, write_summary
from verl.utils.files import replace_text

UPLOADED = ("index.html", "results.md", "results.csv")
"""Files that are added to the tracker's run on wandb."""


COLUMNS_OF_LOGS = 140
"""Width of the table without a terminal."""


class Figures(NamedTuple):
    """The figures of one checkpoint on one benchmark."""

    run: str
    step: int
    temperature: str
    """`` T=0.6`` if the checkpoint has several, else empty."""
    benchmark: str
    values: Mapping[str, float]


def publish(folder: Path, results: Sequence[TaskResult], config: EvaluationConfig, display: EvaluationDisplay) -> None:
    """Write everything into ``folder``, log the figures to the trackers, and show the table."""
    summary = write_results(folder, results, config.trainer.experiment_name, config.compare_to, config.seed)
    tracked = tracked_figures(summary)
    figures = [
        Figures(r.run, r.step, label.removeprefix(r.label), r.benchmark, tracked[r.benchmark, label])
        for r, label in zip(results, row_labels(results), strict=True)
    ]
    record(folder, config, figures, display.errors, UPLOADED)
    table, console = terminal_table("Evaluation (percent)", overview_table(summary)), display.console
    console.print(table, width=None if console.is_terminal else max(console.width, COLUMNS_OF_LOGS))
    display.say(f"page: {folder}/index.html")
    display.say(f"tables: {folder}/results.md, {folder}/results.csv")


def write_results(
    folder: Path, results: Sequence[TaskResult], title: str = "Evaluation", compare_to: str = "auto", seed: int = 0
) -> Summary:
    """Write all results into ``folder`` and return their figures.

    ``<run>/step_<N>/<benchmark>/T<temperature>/results.json`` and ``samples.parquet`` for each result, ``results.md``,
    ``results.csv`` and ``index.html``; they replace those of an earlier evaluation. The same results give the same
    files.

    ``compare_to`` and ``seed`` are those of :func:`summarise`.
    """
    summary = summarise(results, compare_to, seed)
    folder.mkdir(parents=True, exist_ok=True)
    rows = summary.table.to_dict("index")
    for result, label in zip(results, row_labels(results), strict=True):
        write_result(folder, result, rows[result.benchmark, label])
    replace_text(folder / "results.md", markdown(summary, title))
    replace_text(folder / "results.csv", csv_text(summary))
    replace_text(folder / "index.html", make_page(summary, results, title))
    return summary


def record(
    folder: Path,
    config: EvaluationConfig,
    figures: Iterable[Figures],
    failed: Sequence[str],
    uploaded: Sequence[str],
) -> None:
    """Write ``config.yaml`` and ``metrics.jsonl``, log to the trackers, and at last write ``summary.json``.

    Trackers get ``<run>/<benchmark>/pass@1`` and so on at each step, so that they draw curves over training.

    Args:
        failed: a line for each model or benchmark that failed.
        uploaded: files that are added to the tracker's run on wandb.
    """
    by_label: dict[str, dict[str, Mapping[str, float]]] = {}
    by_step: dict[int, dict[str, float]] = {}
    for run, step, temperature, benchmark, values in figures:
        by_label.setdefault(f"{run}@{step}{temperature}", {})[benchmark] = values
        metrics = by_step.setdefault(step, {})
        metrics |= {f"{run}{temperature}/{benchmark}/{name}": value for name, value in values.items()}
    # A record of this evaluation alone, not of earlier ones in the same folder.
    drop_records(folder, last_step=None)
    trainer = config.trainer
    tracker = Tracker(folder, trainer.logger, trainer.project_name, trainer.experiment_name, config)
    try:
        for step in sorted(by_step):
            tracker.log(step, by_step[step])
        write_summary(folder, {"seed": config.seed, "figures": by_label, "failed": list(failed)})
        if "wandb" in trainer.logger:
            # Late: wandb needs to be installed only where it is asked for.
            import wandb

            for name in uploaded:
                wandb.save(str(folder / name), base_path=str(folder), policy="now")
    finally:
        tracker.close()


def tracked_figures(summary: Summary) -> dict[Key, dict[str, float]]:
    """Return the figures of each checkpoint on each benchmark by their names in trackers, without undefined ones."""
    names = {(column := f"{name}@{k}"): column for name in summary.figures for k in summary.ks}
    names |= {"mean_tokens": "response_length/mean", "truncation_rate": "response_length/clip_ratio"}
    names |= {"repetition_rate": "repetition_rate", f"reason_{PROMPT_TOO_LONG}": PROMPT_TOO_LONG}
    names |= {(mean := f"{name}/{group}"): f"{mean}/mean" for name in summary.metrics for group in GROUPS}
    return {
        key: {names[name]: value for name, value in row.items() if name in names and math.isfinite(value)}
        for key, row in summary.table.to_dict("index").items()
    }
