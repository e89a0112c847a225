"""Parses a run's config and checks the model, data and folder that it specifies."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import DictConfig

from verl.checkpoint.attempts import ATTEMPT, LOCK
from verl.checkpoint.folders import refuse_verl_shards
from verl.checkpoint.requeue import is_requeued
from verl.config.checks import join_source
from verl.config.common import RunConfig
from verl.config.data import GENERATOR, DataConfig, hub_set
from verl.config.errors import ConfigError, Mistakes
from verl.config.load import parse_config
from verl.config.paths import find_model, find_path, places
from verl.config.teacher import NO_MODEL, POLICY, TeacherConfig
from verl.utils.files import unreadable

ConfigT = TypeVar("ConfigT")


def parse_run_config(schema: type[ConfigT], tree: DictConfig) -> ConfigT:
    """Parse the config, and check that the model and the data exist and that the run folder can be used.

    Raises:
        ConfigError: If ``parse_config`` raises it, a file or model is missing, or the folder's run cannot be resumed.
    """
    config: Any = parse_config(schema, tree)
    mistakes = Mistakes()
    files = {name: [*map(find_path, getattr(config.data, name))] for name in ("train_files", "val_files")}
    config = replace(config, model=_resolve_model(config.model), data=replace(config.data, **files))
    with mistakes.collected():
        require_model("model.path", config.model.path)
    # A custom data class may read any files.
    custom_reader = isinstance(config.data, DataConfig) and config.data.custom_cls.path is not None
    for name in () if custom_reader else ("train_files", "val_files"):
        with mistakes.collected():
            _require_files(f"data.{name}", getattr(config.data, name))
    with mistakes.collected():
        _require_run_folder(config.trainer)
    # Workers on a cluster have different working directories.
    folder = str(Path(config.trainer.default_local_dir).resolve())
    config = replace(config, model=_absolute(config.model), trainer=replace(config.trainer, default_local_dir=folder))
    for group in ("critic", "reward_model", "teacher"):
        if getattr(config, f"uses_{group}", False) and getattr(config, group).model.path not in (NO_MODEL, POLICY):
            part = getattr(config, group)
            part = replace(part, model=_resolve_model(part.model))
            with mistakes.collected():
                require_model(f"{group}.model.path", part.model.path)
            config = replace(config, **{group: replace(part, model=_absolute(part.model))})
    if getattr(config, "uses_teacher", False) and not config.teacher.is_server:
        with mistakes.collected():
            config = replace(config, teacher=_with_found_sources(config.teacher))
    mistakes.raise_all()
    return config  # type: ignore[no-any-return]


def _resolve_model(model: Any) -> Any:
    """Return the model config with ``path`` resolved if it refers to a shipped model or a run's newest model."""
    return replace(model, path=find_model(model.path))


def _absolute(model: Any) -> Any:
    """Return the model config with an absolute path if the model is a local folder. Hub ids are unchanged."""
    folder = Path(model.path)
    return replace(model, path=str(folder.resolve())) if folder.exists() else model


def _with_found_sources(teacher: TeacherConfig) -> TeacherConfig:
    """Return the config with the full paths of the data sources' teachers. Raise ``ConfigError`` if one is missing."""
    entries = []
    for source, path in teacher.sources.items():
        model = _resolve_model(replace(teacher.model, path=path))
        require_model(f"teacher.by_source[{source}]", model.path)
        entries.append(join_source(source, _absolute(model).path))
    return replace(teacher, by_source=entries)


def _require_files(field: str, paths: Sequence[str]) -> None:
    for path in paths:
        generated = field.startswith("data.") and path.startswith(GENERATOR)
        if hub_set(path) is None and not generated and not Path(path).is_file():
            shipped = (
                "restore the shipped data with `git checkout data`, or " if Path(path).parts[:1] == ("data",) else ""
            )
            what = "is a folder" if Path(path).is_dir() else f"no such file ({places(path)})"
            raise ConfigError(
                f"{field}={path!r}: {what}; {shipped}name a parquet, jsonl or json file, or a hub set such as "
                "owner/name:config:split"
            )


def _require_run_folder(trainer: RunConfig) -> None:
    """Raise ``ConfigError`` unless the folder is new or contains the run to resume (``trainer.resume_mode``).

    A run that ended before its first checkpoint may be overwritten.
    """
    folder = Path(trainer.default_local_dir)
    if not os.path.exists(folder):  # noqa: PTH110  # tolerates invalid names, which the lock rejects later
        return
    field = f"trainer.default_local_dir={trainer.default_local_dir!r}"
    fix = "name another folder"
    if folder.is_dir() and (reason := unreadable(sorted(folder.iterdir()))):
        raise ConfigError(f"{field}: {reason}; {fix}")
    if folder.is_dir() and all(map(_is_temporary, folder.iterdir())):
        return
    if trainer.resume_mode == "disable":
        raise ConfigError(f"{field}: already holds a run; {fix} or remove it")
    if not (folder / "config.yaml").is_file():
        raise ConfigError(f"{field}: already exists and is not a run folder (it has no config.yaml); {fix}")
    source = Path(trainer.resume_from_path).resolve().parent if trainer.resume_from_path else None
    holds_results = (folder / "summary.json").exists() or any(folder.glob("global_step_*"))
    other = source != folder.resolve() and not is_requeued(trainer)
    if trainer.resume_mode == "path" and other and holds_results:
        raise ConfigError(
            f"{field}: already holds a run other than that of trainer.resume_from_path={trainer.resume_from_path!r}; "
            "name another folder, or resume this run with trainer.resume_mode=auto trainer.resume_from_path=null"
        )


def _is_temporary(path: Path) -> bool:
    """Return whether a file in a run folder is the lock file, the attempt file, or a partial file of a killed run."""
    return path.name in (LOCK, ATTEMPT) or (path.name.startswith(".") and path.name.endswith(".unfinished"))


def require_model(field: str, path: str) -> None:
    """Raise a ``ConfigError`` for ``field`` if a folder has no model. Hub ids (``owner/name``) are accepted.

    Paths below ``data/`` are always treated as folders, because ``data/`` contains the shipped model.
    """
    folder = Path(path)
    hub_id = len(folder.parts) == 2 and not folder.is_absolute() and not folder.parent.exists()
    hub_id = hub_id and not _in_data(folder)
    _refuse_unmerged(field, folder)
    if folder.is_dir() and (reason := unreadable(sorted(folder.iterdir()))):
        raise ConfigError(f"{field}={path!r}: {reason}; name a folder saved by save_pretrained")
    if not hub_id and not (folder / "config.json").is_file():
        shipped = "restore the shipped model with `git checkout data`, or " if _in_data(folder) else ""
        raise ConfigError(
            f"{field}={path!r}: no config.json there ({places(path)}); {shipped}name a folder saved by "
            "save_pretrained or a hub id such as Qwen/Qwen2.5-1.5B"
        )


def _refuse_unmerged(field: str, folder: Path) -> None:
    """Raise a ``ConfigError`` with the model's location if ``folder`` is part of a checkpoint but has no model."""
    if any(folder.glob("*.safetensors")):
        return
    for part in (folder.parent, folder, folder / "actor"):
        refuse_verl_shards(f"{field}={str(folder)!r}", part)
    if (folder.parent / "shards").is_dir():
        fix = f"`verl-export {folder.parents[1]}` creates it"
        raise ConfigError(f"{field}={str(folder)!r}: this checkpoint has no exported model; {fix}")
    for exported in (folder / "huggingface", folder / "actor" / "huggingface"):
        if not (folder / "config.json").is_file() and (exported / "config.json").is_file():
            raise ConfigError(f"{field}={str(folder)!r}: is part of a checkpoint; name its model, {exported}")


def _in_data(path: Path) -> bool:
    """Return whether the path is in ``data/``, which contains the shipped data and model."""
    return path.parts[:1] == ("data",)
