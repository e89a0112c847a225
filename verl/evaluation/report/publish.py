"""Results on their way out: files, the console, and trackers."""

from collections.abc import Sequence
from pathlib import Path

from verl.config.evaluation import EvaluationConfig
from verl.evaluation.progress import EvaluationDisplay
from verl.evaluation.report.files import write_results
from verl.evaluation.report.tables import console_table
from verl.evaluation.results import RunResult, row_labels
from verl.evaluation.statistics.summary import Row, Summary
from verl.run.tracking import Tracker, drop_records, write_summary

UPLOADED = ("index.html", "results.md", "results.csv")


def publish(folder: Path, results: Sequence[RunResult], config: EvaluationConfig, display: EvaluationDisplay) -> None:
    """Write everything into ``folder``, replacing what an earlier evaluation wrote there, and show the table."""
    summary = write_results(
        folder, results, title=config.trainer.experiment_name, compare_to=config.compare_to, seed=config.seed
    )
    _track(folder, results, summary, config)
    display.show(console_table(summary))
    display.say(f"page: {folder}/index.html")
    display.say(f"tables: {folder}/results.md, {folder}/results.csv")


def _track(folder: Path, results: Sequence[RunResult], summary: Summary, config: EvaluationConfig) -> None:
    # A record of this evaluation alone, not of earlier ones in the same folder.
    drop_records(folder, last_step=None)
    trainer = config.trainer
    tracker = Tracker(folder, trainer.logger, trainer.project_name, trainer.experiment_name, config)
    try:
        for step, metrics in metrics_by_step(results, summary).items():
            tracker.log(step, metrics)
        write_summary(folder, {"seed": config.seed, "figures": metrics_by_label(results, summary)})
        if "wandb" in trainer.logger:
            _upload(folder)
    finally:
        tracker.close()


def _upload(folder: Path) -> None:
    """Add the page and the tables to the tracker's run on wandb."""
    # Late: only evaluations that ask for it need it installed.
    import wandb

    for name in UPLOADED:
        wandb.save(str(folder / name), base_path=str(folder), policy="now")


def metrics_by_step(results: Sequence[RunResult], summary: Summary) -> dict[int, dict[str, float]]:
    """Step, ascending -> ``<run>/<benchmark>/pass@1`` and so on, so that trackers draw curves over training."""
    steps: dict[int, dict[str, float]] = {}
    for result, row in _rows(results, summary):
        metrics = steps.setdefault(result.step, {})
        prefix = f"{result.run}{row.label.removeprefix(result.label)}/{result.benchmark}"
        metrics |= {f"{prefix}/{name}": value for name, value in figures(row).items()}
    return dict(sorted(steps.items()))


def metrics_by_label(results: Sequence[RunResult], summary: Summary) -> dict[str, dict[str, dict[str, float]]]:
    """Label -> benchmark -> figure."""
    labels: dict[str, dict[str, dict[str, float]]] = {}
    for result, row in _rows(results, summary):
        labels.setdefault(row.label, {})[result.benchmark] = figures(row)
    return labels


def figures(row: Row) -> dict[str, float]:
    """What trackers are given of one checkpoint on one benchmark."""
    found = {f"pass@{k}": estimate.value for k, estimate in row.pass_at_k.items()}
    found |= {f"maj@{k}": estimate.value for k, estimate in row.maj_at_k.items()}
    found |= {"response_length/mean": row.mean_tokens, "response_length/clip_ratio": row.truncation_rate}
    found["repetition_rate"] = row.repetition_rate
    for name, groups in row.metrics.items():
        found |= {f"{name}/{group}/mean": spread.mean for group, spread in groups.items() if spread.count}
    return found


def _rows(results: Sequence[RunResult], summary: Summary) -> list[tuple[RunResult, Row]]:
    labels = row_labels(results)
    rows = [summary.row(label, result.benchmark) for result, label in zip(results, labels, strict=True)]
    return [(result, row) for result, row in zip(results, rows, strict=True) if row is not None]
