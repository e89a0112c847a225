"""Prints a table of training runs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verl.utils.portable import printable
from verl_pages.run import overview_figures, runs_in
from verl_pages.run_folder import RunFolder, read_run

HEADER = ("started", "experiment", "steps", "score", "validation pass@1", "folder")


def print_runs(folders: Sequence[Path]) -> None:
    """Print a table of the runs in ``folders``, with the most recently started run first."""
    paths = [run for folder in folders for run in runs_in(folder)]
    runs = sorted((read_run(path, str(path)) for path in paths), key=_started, reverse=True)
    rows = [HEADER, *(tuple(map(printable, _cells(run))) for run in runs)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _started(run: RunFolder) -> str:
    """Return a run's start time in ISO format, or "" for runs of older versions, so that these are listed last."""
    return str(run.start.get("started") or "")


def _cells(run: RunFolder) -> list[str]:
    planned = run.option("trainer.total_training_steps")
    steps = f"{run.last_step} of {planned}" if planned and not run.summary else str(run.last_step)
    figures: dict[str, Any] = dict(overview_figures(run))
    score = f"{figures['score']:.3g}" if "score" in figures else "-"
    # A run with a single validation has the same first and last one.
    validations = dict.fromkeys(tuple(figures[name]) for name in ("first", "last") if name in figures)
    passes = " to ".join(f"{share:.1%}" for share, _ in validations) or "-"
    started = _started(run)[:16].replace("T", " ") or "-"
    return [started, run.option("trainer.experiment_name") or "-", steps, score, passes, str(run.path)]
