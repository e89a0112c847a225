"""What is evaluated: checkpoints of training runs, and models by themselves."""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from verl.checkpoint.folders import POINTER, latest_checkpoint
from verl.config.errors import ConfigError
from verl.config.evaluation import LAST, CandidateConfig, EvaluationConfig
from verl.config.load import require_model

CHECKPOINT = re.compile(r"global_step_(\d+)")
MODEL_IN_CHECKPOINT = Path("actor", "huggingface")

MAX_FOLDER_NAME = 100
"""Characters of a folder that is named after what is compared in it."""


@dataclass(frozen=True)
class Target:
    """One model to evaluate."""

    run: str
    """Alias of the run, or the model's name."""
    step: int
    """0 for the base model and for a model by itself."""
    path: str
    """The model: a folder or a hub id."""
    template: str
    max_response_length: int

    @property
    def label(self) -> str:
        return f"{self.run}@{self.step}"


@dataclass(frozen=True)
class Selection:
    """What the configuration names."""

    targets: list[Target]
    problems: list[str]
    """What could not be found, one line each."""
    notes: list[str]
    """What the user should know."""
    name: str
    """Of the folder of results."""


def select_targets(config: EvaluationConfig) -> Selection:
    """The models that ``config`` names, in its order: runs, and within a run its steps."""
    targets: list[Target] = []
    problems: list[str] = []
    notes: list[str] = []
    names: list[str] = []
    candidates: Mapping[str, CandidateConfig] = config.runs or {"": config.model}
    for alias, candidate in candidates.items():
        field = f"runs.{alias}" if alias else "model"
        if candidate.path is None:
            path = _newest_or_base(config.runs_dir, candidate, notes)
        else:
            path = candidate.path
        try:
            found, name = _targets_of(alias, field, path, candidate, problems)
        except ConfigError as error:
            problems.append(str(error))
            continue
        targets += found
        names.append(alias or name)
    return Selection(targets, problems, notes, "+".join(names)[:MAX_FOLDER_NAME])


def newest_run(runs_dir: Path, base: str) -> Path | None:
    """The folder of the training run below ``runs_dir`` from the model ``base`` whose newest checkpoint is newest."""
    wanted = Path(base).resolve()
    runs = [run for run in _runs(runs_dir) if Path(_run_option(run, "model", "path") or "").resolve() == wanted]
    return max(runs, key=lambda run: (run / POINTER).stat().st_mtime, default=None)


def _runs(folder: Path) -> Iterator[Path]:
    """Folders of training runs with a complete checkpoint."""
    for parent, folders, files in os.walk(folder):
        if POINTER in files:
            folders.clear()
            yield Path(parent)


def _newest_or_base(runs_dir: str, candidate: CandidateConfig, notes: list[str]) -> str:
    assert candidate.base is not None, "the config names a path or a base"
    run = newest_run(Path(runs_dir), candidate.base)
    if run is None:
        notes.append(
            f"no run of train.sh from {candidate.base} with a checkpoint below {runs_dir}/: evaluating that model "
            "alone; `bash train.sh` trains it"
        )
        return candidate.base
    return str(run)


def _targets_of(
    alias: str, field: str, path: str, candidate: CandidateConfig, problems: list[str]
) -> tuple[list[Target], str]:
    """The models of one candidate and a folder's name for them; a step that is missing goes to ``problems``.

    Raises:
        ConfigError: there is neither a model nor a training run.
    """
    root, steps = Path(path), candidate.steps
    checkpoint = _checkpoint_of(root)
    if checkpoint is not None:
        root, steps = checkpoint.parent, [_step_of(checkpoint)]
    if not _is_run(root):
        require_model(f"{field}.path", path)
        name = alias or _as_name(Path(path).resolve().name if root.exists() else root.name)
        return [Target(name, 0, _full_path(path), candidate.template, candidate.max_response_length)], name
    own_name = _as_name(str(_run_option(root, "trainer", "experiment_name") or root.resolve().name))
    targets = []
    for step in steps:
        try:
            step, model = _find_step(root, step, field, candidate.base)
        except ConfigError as error:
            problems.append(str(error))
            continue
        if step not in [target.step for target in targets]:
            targets.append(Target(alias or own_name, step, model, candidate.template, candidate.max_response_length))
    return targets, _as_name(f"{own_name}_{root.resolve().name}")


def _find_step(root: Path, step: int, field: str, base: str | None) -> tuple[int, str]:
    """A run's step, the newest for ``LAST``, and the model's place. Raises ``ConfigError`` if it is not there."""
    if step == 0:
        model = base or _run_option(root, "model", "path")
        if model is None:
            raise ConfigError(f"{field}.base=null: {root}/config.yaml names no model.path; name the base model")
        require_model(f"{field}.base", str(model))
        return 0, _full_path(str(model))
    known = sorted(_step_of(folder) for folder in root.glob("global_step_*") if CHECKPOINT.fullmatch(folder.name))
    if not known:
        raise ConfigError(f"{field}.steps={step}: {root} has no checkpoint yet; name 0, the base model, alone")
    found = step
    if step == LAST:
        newest = latest_checkpoint(root)
        found = known[-1] if newest is None else _step_of(newest)
    folder = root / f"global_step_{found}" / MODEL_IN_CHECKPOINT
    if not (folder / "config.json").is_file():
        there = ", ".join(map(str, known))
        shards = (folder.parent / "shards").is_dir()
        made_by = "; `python -m verl.trainer.main_export` makes it" if shards else ""
        raise ConfigError(f"{field}.steps={step}: no model in {folder}{made_by}; there are {there}")
    return found, _full_path(str(folder))


def _full_path(model: str) -> str:
    """A local folder's full path, as workers may have other working directories; a hub id stays as it is."""
    return str(Path(model).resolve()) if Path(model).exists() else model


def _checkpoint_of(path: Path) -> Path | None:
    """The ``global_step_N`` that ``path`` is, or is the model of; None for anything else."""
    parts = MODEL_IN_CHECKPOINT.parts
    folder = path.parents[len(parts) - 1] if path.parts[-len(parts) :] == parts else path
    return folder if CHECKPOINT.fullmatch(folder.name) else None


def _step_of(checkpoint: Path) -> int:
    found = CHECKPOINT.fullmatch(checkpoint.name)
    assert found is not None, checkpoint
    return int(found.group(1))


def _is_run(root: Path) -> bool:
    return (root / POINTER).is_file() or any(root.glob("global_step_*"))


def _run_option(root: Path, group: str, option: str) -> Any:
    """An option that a run had, by its ``config.yaml``; None without one."""
    path = root / "config.yaml"
    if not path.is_file():
        return None
    try:
        return yaml.safe_load(path.read_text())[group][option]
    except (yaml.YAMLError, KeyError, TypeError):
        return None


def _as_name(text: str) -> str:
    """``text`` as a folder may be called."""
    return re.sub(r"[^\w.+-]+", "_", text).strip("._-+") or "model"
