"""What an evaluation leaves behind: files of every result, tables, plots, the page, and the trackers' records."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from verl.config.evaluation import EvaluationConfig
from verl.evaluation.progress import EvaluationDisplay
from verl.evaluation.report.page import make_page
from verl.evaluation.report.plots import write_plots
from verl.evaluation.report.tables import console_table, csv_text, markdown
from verl.evaluation.results import PROMPT_TOO_LONG, TaskResult, write_result
from verl.evaluation.statistics.summary import Summary, SummaryRow, rows_of, summarise
from verl.run.tracking import Tracker, drop_records, write_summary
from verl.utils.files import replace_text
from verl_pages.evaluation import MAX_PAGE_BYTES

UPLOADED = ("index.html", "results.md", "results.csv")
"""Files that are added to the tracker's run on wandb."""


def publish(
    folder: Path,
    results: Sequence[TaskResult],
    config: EvaluationConfig,
    display: EvaluationDisplay,
    failed: Sequence[str] = (),
) -> None:
    """Write everything into ``folder``, log the figures to the trackers, and show the table.

    ``failed``: a line for each evaluation that failed.
    """
    summary = write_results(
        folder, results, title=config.trainer.experiment_name, compare_to=config.compare_to, seed=config.seed
    )
    _track(folder, rows_of(results, summary), config, failed)
    display.console.print(console_table(summary))
    display.say(f"page: {folder}/index.html")
    display.say(f"tables: {folder}/results.md, {folder}/results.csv")


def write_results(
    folder: Path,
    results: Sequence[TaskResult],
    title: str = "Evaluation",
    compare_to: str = "auto",
    seed: int = 0,
    max_page_bytes: int = MAX_PAGE_BYTES,
) -> Summary:
    """Write all results into ``folder`` and return their figures.

    ``<run>/step_<N>/<benchmark>/T<temperature>/results.json`` and ``samples.parquet`` for each result, ``results.md``,
    ``results.csv``, ``plots/*.svg`` and ``*.png``, and ``index.html``; they replace those of an earlier evaluation. The
    same results give the same files.

    Args:
        folder: created if missing.
        results: in the order of the tables; may be empty.
        title: of the tables and the page.
        compare_to: as in :func:`verl.evaluation.statistics.summary.summarise`.
        seed: of the bootstrap.
        max_page_bytes: size of ``index.html``; responses are shortened to keep it.

    Raises:
        ValueError: two results of one checkpoint, benchmark and temperature; unknown ``compare_to``.
    """
    summary = summarise(results, compare_to, seed)
    folder.mkdir(parents=True, exist_ok=True)
    for result, row in rows_of(results, summary):
        figures = asdict(row)
        del figures["label"], figures["benchmark"]
        write_result(folder, result, figures)
    replace_text(folder / "results.md", markdown(summary, title))
    replace_text(folder / "results.csv", csv_text(summary))
    write_plots(folder / "plots", summary)
    replace_text(folder / "index.html", make_page(summary, results, title, max_page_bytes))
    return summary


def _track(
    folder: Path, rows: Sequence[tuple[TaskResult, SummaryRow]], config: EvaluationConfig, failed: Sequence[str]
) -> None:
    by_label: dict[str, dict[str, dict[str, float]]] = {}
    for result, row in rows:
        by_label.setdefault(row.label, {})[result.benchmark] = tracked_figures(row)
    record(folder, config, metrics_by_step(rows), {"figures": by_label, "failed": list(failed)}, UPLOADED)


def record(
    folder: Path,
    config: EvaluationConfig,
    by_step: Mapping[int, Mapping[str, float]],
    summary: Mapping[str, Any],
    uploaded: Sequence[str],
) -> None:
    """Write ``config.yaml`` and ``metrics.jsonl``, log to the trackers, and at last write ``summary.json``.

    ``uploaded``: files that are added to the tracker's run on wandb.
    """
    # A record of this evaluation alone, not of earlier ones in the same folder.
    drop_records(folder, last_step=None)
    trainer = config.trainer
    tracker = Tracker(folder, trainer.logger, trainer.project_name, trainer.experiment_name, config)
    try:
        for step, metrics in by_step.items():
            tracker.log(step, metrics)
        write_summary(folder, {"seed": config.seed, **summary})
        if "wandb" in trainer.logger:
            # Late: wandb needs to be installed only where it is asked for.
            import wandb

            for name in uploaded:
                wandb.save(str(folder / name), base_path=str(folder), policy="now")
    finally:
        tracker.close()


def metrics_by_step(rows: Sequence[tuple[TaskResult, SummaryRow]]) -> dict[int, dict[str, float]]:
    """Step, ascending -> ``<run>/<benchmark>/pass@1`` and so on, so that trackers draw curves over training."""
    steps: dict[int, dict[str, float]] = {}
    for result, row in rows:
        prefix = f"{result.run}{row.label.removeprefix(result.label)}/{result.benchmark}"
        metrics = steps.setdefault(result.step, {})
        metrics |= {f"{prefix}/{name}": value for name, value in tracked_figures(row).items()}
    return dict(sorted(steps.items()))


def tracked_figures(row: SummaryRow) -> dict[str, float]:
    """The figures of one checkpoint on one benchmark, by their names in trackers."""
    found = {f"pass@{k}": estimate.value for k, estimate in row.pass_at_k.items()}
    found |= {f"maj@{k}": estimate.value for k, estimate in row.maj_at_k.items()}
    found |= {"response_length/mean": row.mean_tokens, "response_length/clip_ratio": row.truncation_rate}
    found["repetition_rate"] = row.repetition_rate
    if row.reasons.get(PROMPT_TOO_LONG):
        found[PROMPT_TOO_LONG] = row.reasons[PROMPT_TOO_LONG]
    for name, groups in row.metrics.items():
        found |= {f"{name}/{group}/mean": spread.mean for group, spread in groups.items() if spread.count}
    return found
