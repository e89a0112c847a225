"""Checks the trackers in ``trainer.logger`` before a run starts, and defines a backend for each tracker.

Packages are imported only in runs that use them, because mlflow and swanlab are optional.
"""

import json
import math
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, NamedTuple

from verl.config.errors import ConfigError, in_one_line
from verl.utils.files import damaged_name, open_to_write, replace_text

WANDB_ID = "wandb_id.txt"
"""File in a run's folder with the id of the wandb run to resume."""

MLFLOW_ID = "mlflow_id.txt"
"""File in a run's folder with the id of the mlflow run to resume."""

PACKAGES = ("tensorboard", "wandb", "mlflow", "swanlab")
"""Trackers that require a package with the same name."""

Metrics = Mapping[str, float]


class Table(NamedTuple):
    """Table of text and numbers to record in addition to metrics."""

    columns: list[str]
    rows: list[list[str | float | None]]


@dataclass(frozen=True)
class Backend:
    """Destination to which metrics are written."""

    log: Callable[[int, Metrics], None]
    close: Callable[[], None]
    table: Callable[[int, str, Table], None] = lambda step, name, table: None
    """Function that records a table under ``name``. For most trackers, it does nothing."""


@dataclass(frozen=True)
class RunInfo:
    """Information about a run that is passed to trackers."""

    folder: Path
    project: str
    experiment: str
    config: dict[str, Any]
    last_step: int | None
    """Step that the run resumes from, or None if it starts from scratch."""


def check_trackers(loggers: Sequence[str]) -> None:
    """Check that all trackers are usable before the run starts.

    Raises ``ConfigError`` if a package or an API key is missing.
    """
    for name in loggers:
        field = f"trainer.logger={name!r}"
        if name in PACKAGES:
            spec = find_spec(name)
            # A folder with the package's name, which a tracker may have created, has no origin.
            if spec is None or spec.origin is None:
                raise ConfigError(f"{field}: {name} is not installed; `pip install {name}`, or leave it out")
        if name == "wandb":
            _check_wandb(field)
        if name == "swanlab":
            saved = Path(os.environ.get("SWANLAB_SAVE_DIR", Path.home() / ".swanlab")) / ".netrc"
            in_cloud = os.environ.get("SWANLAB_MODE", "cloud") == "cloud"
            if in_cloud and "SWANLAB_API_KEY" not in os.environ and not saved.is_file():
                fix = "run `swanlab login`, set SWANLAB_API_KEY, or set SWANLAB_MODE=local to record here"
                raise ConfigError(f"{field}: not logged in; {fix}")


def _check_wandb(field: str) -> None:
    """Raise ``ConfigError`` if wandb rejects its settings or lacks a required API key."""
    import wandb

    fix = "run `wandb login`, set WANDB_API_KEY, or set WANDB_MODE=offline to record here; or leave it out"
    try:
        settings = wandb.setup().settings
        # Unless silent, a login asks the server for the user's name, which can take long on a slow network. The server
        # checks the key when the run is opened, before the workers start.
        silent, settings.silent = settings.silent, True
        logged_in = settings.mode in ("offline", "dryrun", "disabled") or wandb.login(prompt=False, verify=False)
        settings.silent = silent
    except (wandb.Error, ValueError) as error:  # a malformed key, or an unknown WANDB_... setting
        raise ConfigError(f"{field}: {in_one_line(error)}; {fix}") from error
    if not logged_in:
        raise ConfigError(f"{field}: not logged in; {fix}")


def keep_records(path: Path, last_step: int) -> Path | None:
    """Remove the records of steps after ``last_step`` and an incomplete last line.

    If other lines are damaged, only readable records are kept, and the original file is copied first. Returns the path
    of this copy. Raises ``ConfigError`` if the file cannot be read or copied.
    """
    try:
        lines = [(_step_of(line), line) for line in path.read_bytes().split(b"\n")]
        # The text after the last line break is either empty or an incomplete record.
        if lines[-1][0] is None:
            lines.pop()
        copy = None
        if any(step is None for step, _ in lines):
            copy = damaged_name(path)
            shutil.copy2(path, copy)
        kept = (line.decode() for step, line in lines if step is not None and step <= last_step)
        replace_text(path, "".join(f"{line}\n" for line in kept))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read or rewritten: {error.strerror}; move it away") from error
    return copy


def _step_of(line: bytes) -> int | None:
    """Return the ``step`` of a record, or None if the line is not a valid record."""
    try:
        record = json.loads(line.decode())
    except (ValueError, RecursionError):
        return None
    step = record.get("step") if isinstance(record, dict) else None
    return step if type(step) is int else None


def jsonl_backend(path: Path) -> Backend:
    """Return a backend that writes one JSON line per step, with ``step`` before the metrics."""
    file = os.fdopen(open_to_write(path, os.O_WRONLY | os.O_APPEND), "a", buffering=1)
    return _lines(path, file, lambda step, metrics: {"step": step, **metrics})


def _file_backend(run: RunInfo) -> Backend:
    """Return a backend that writes veRL's format (metrics in ``data``), to ``VERL_FILE_LOGGER_PATH`` if set."""
    path = os.environ.get("VERL_FILE_LOGGER_PATH")
    if not path:
        return Backend(lambda step, metrics: None, lambda: None)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    mode = "w" if run.last_step is None else "a"
    if run.last_step is not None and Path(path).is_file():
        keep_records(Path(path), run.last_step)
    file = Path(path).open(mode, buffering=1)
    return _lines(Path(path), file, lambda step, metrics: {"step": step, "data": metrics})


def _lines(path: Path, file: IO[str], record: Callable[[int, dict[str, float | None]], dict[str, Any]]) -> Backend:
    def log(step: int, metrics: Metrics) -> None:
        # JSON does not support NaN and infinity.
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        try:
            file.write(json.dumps(record(step, finite)) + "\n")
            # The record must be on disk before the step's checkpoint is.
            os.fsync(file.fileno())
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from None

    def close() -> None:
        with suppress(OSError):  # failed writes have already raised an error
            file.close()

    return Backend(log, close)


def _tensorboard_backend(run: RunInfo) -> Backend:
    from torch.utils.tensorboard import SummaryWriter

    # From this step on, TensorBoard hides the records in earlier files.
    purge_step = None if run.last_step is None else run.last_step + 1
    writer = SummaryWriter(str(run.folder / "tensorboard"), purge_step=purge_step)

    def log(step: int, metrics: Metrics) -> None:
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)
        # Flush now, because a resumed run will not record these steps again.
        writer.flush()

    def log_table(step: int, name: str, table: Table) -> None:
        writer.add_text(name, markdown_table(table), step)
        writer.flush()

    return Backend(log, writer.close, log_table)


def markdown_table(table: Table) -> str:
    """Return ``table`` as Markdown for TensorBoard, escaping untrusted text in cells."""
    rows = [table.columns, ["---"] * len(table.columns)]
    rows += [["" if cell is None else _literal(str(cell)) for cell in row] for row in table.rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _literal(text: str) -> str:
    """Replace special characters of Markdown and HTML with numeric entities, but keep line breaks."""
    escaped = re.sub(r"[^\w\s]", lambda match: f"&#{ord(match[0])};", text)
    return re.sub(r"\r\n?|\n", "<br>", escaped)


def _wandb_backend(run: RunInfo) -> Backend:
    import wandb

    id_file = run.folder / WANDB_ID
    if not id_file.exists():
        replace_text(id_file, f"{uuid.uuid4().hex[:8]}\n")
    # All processes of this run share one wandb run, which ignores repeated steps; these would have the same values.
    own_id = id_file.read_text().strip()
    # At the end wandb would print hundreds of lines on the metrics, between the last step and the run's own tables.
    settings = wandb.Settings() if "WANDB_QUIET" in os.environ else wandb.Settings(quiet=True)
    options: dict[str, Any] = {"project": run.project, "name": run.experiment, "dir": str(run.folder), "id": own_id}
    try:
        opened = wandb.init(**options, config=run.config, resume="allow", settings=settings)
    except (wandb.Error, ValueError) as error:
        reason = in_one_line(error)
        raise ConfigError(f"trainer.logger='wandb': {reason}; or set WANDB_MODE=offline to record here") from error

    def log(step: int, metrics: Metrics) -> None:
        opened.log(dict(metrics), step=step)

    def log_table(step: int, name: str, table: Table) -> None:
        opened.log({name: wandb.Table(columns=[*table.columns], data=table.rows)}, step=step)

    return Backend(log, opened.finish, log_table)


def _mlflow_backend(run: RunInfo) -> Backend:
    import mlflow

    # Records stay in the run's folder unless the user chooses another location.
    if "MLFLOW_TRACKING_URI" not in os.environ:
        mlflow.set_tracking_uri(f"sqlite:///{(run.folder / 'mlflow.db').resolve()}")
    id_file = run.folder / MLFLOW_ID
    # Some platforms have already opened a run.
    known = os.environ.get("MLFLOW_RUN_ID") or (id_file.read_text().strip() if id_file.exists() else None)
    if known:
        mlflow.start_run(run_id=known)
    else:
        mlflow.set_experiment(run.project)
        opened = mlflow.start_run(run_name=run.experiment)
        replace_text(id_file, f"{opened.info.run_id}\n")
        mlflow.log_params({name: str(value)[:500] for name, value in _flat(run.config)})

    def log(step: int, metrics: Metrics) -> None:
        # Unsupported characters are replaced as in veRL, such as pass_at_1 for pass@1.
        names = {name: re.sub(r"[^/\w.\- :]", "_", name.replace("@", "_at_")) for name in metrics}
        mlflow.log_metrics({names[name]: value for name, value in metrics.items() if math.isfinite(value)}, step=step)

    return Backend(log, mlflow.end_run)


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _swanlab_backend(run: RunInfo) -> Backend:
    import swanlab

    if "SWANLAB_API_KEY" in os.environ:
        swanlab.login(os.environ["SWANLAB_API_KEY"])
    swanlab.init(
        project=run.project,
        experiment_name=run.experiment,
        config=run.config,
        logdir=os.environ.get("SWANLAB_LOG_DIR", str(run.folder / "swanlog")),
        mode=os.environ.get("SWANLAB_MODE", "cloud"),
    )

    def log(step: int, metrics: Metrics) -> None:
        swanlab.log({name: value for name, value in metrics.items() if math.isfinite(value)}, step=step)

    return Backend(log, swanlab.finish)


BACKENDS: dict[str, Callable[[RunInfo], Backend]] = {
    "file": _file_backend,
    "tensorboard": _tensorboard_backend,
    "wandb": _wandb_backend,
    "mlflow": _mlflow_backend,
    "swanlab": _swanlab_backend,
}
"""Maps each name in ``trainer.logger`` to the function that opens its backend."""
