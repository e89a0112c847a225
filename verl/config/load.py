"""From Hydra's untyped tree to the frozen dataclasses: the only place where a config is parsed and checked."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import is_dataclass, replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from verl.config.common import RunConfig
from verl.config.data import DataConfig, hub_set
from verl.config.errors import ConfigError
from verl.config.overrides import check_group_values, explain, nearest_option, unsupported
from verl.config.run_file import RUN_CONFIG, read_run_config, run_option

_PACKAGE = Path(__file__).resolve().parents[1]
CONFIG_DIR = (_PACKAGE if (_PACKAGE / "configs").is_dir() else _PACKAGE.parent) / "configs"
"""The folder of the shipped YAML files: inside an installed package, beside it in a checkout."""

LOCK = ".lock"
"""Empty file by which a process locks a run's folder; a folder with nothing but this and ``ATTEMPT`` is free."""

ATTEMPT = ".attempt"
"""File in a run's folder with the number of the newest attempt at the run."""

ConfigT = TypeVar("ConfigT")
LARGEST_INTEGER = 2**32 - 1
"""Integers are at most this large, as a seed; engines hold them in 64 bits, some after a multiplication."""
LARGEST_NUMBER = 3.4e38
_NO_VALUE = "has no value; set it in the YAML or on the command line"
_TYPE_NAMES = {int: "an integer", float: "a number", bool: "true or false", str: "text"}


def parse_config(schema: type[ConfigT], tree: DictConfig) -> ConfigT:
    """Convert a composed Hydra tree into an instance of the dataclass ``schema``.

    Raises:
        ConfigError: for an unknown or missing key, a value of the wrong type, or an inconsistent combination.
    """
    try:
        values = OmegaConf.to_container(tree, resolve=True, throw_on_missing=True)
    except MissingMandatoryValue as error:
        raise ConfigError(f"{error.full_key}: {_NO_VALUE}") from error
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key}: {str(error).splitlines()[0]}") from error
    config: ConfigT = _with_full_paths(_Parser(schema).build(schema, values, ""))
    return config


def compose_config(schema: type, name: str, overrides: Sequence[str] = ()) -> DictConfig:
    """Compose ``configs/<name>.yaml`` with Hydra ``overrides``, without parsing it.

    Raises:
        ConfigError: for an override that does not fit.
    """
    check_group_values(schema, CONFIG_DIR, overrides)
    with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        try:
            return compose(name, overrides=list(overrides))
        except HydraException as error:
            raise ConfigError(explain(error, schema)) from error
        # What Hydra raises for overrides such as "=5", int(x) and integers of thousands of digits.
        except (ValueError, TypeError, AttributeError, AssertionError, ArithmeticError, RecursionError) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ConfigError(f"{' '.join(overrides):.200}: {reason:.200}; write option=value") from error


def load_config(schema: type[ConfigT], name: str, overrides: Sequence[str] = ()) -> ConfigT:
    """Compose ``configs/<name>.yaml`` with Hydra ``overrides`` and parse it into ``schema``.

    Raises:
        ConfigError: as ``compose_config`` and ``parse_config``.
    """
    return parse_config(schema, compose_config(schema, name, overrides))


def parse_run_config(schema: type[ConfigT], tree: DictConfig) -> ConfigT:
    """As ``parse_config``; also checks that the model and the data exist and that the run may use its folder.

    Raises:
        ConfigError: as ``parse_config``; a file or model is missing; the folder holds something this run cannot resume.
    """
    config: Any = parse_config(schema, tree)
    require_model("model.path", config.model.path)
    # A class of your own may read anything.
    own_reader = isinstance(config.data, DataConfig) and config.data.custom_cls.path is not None
    if not own_reader:
        _require_files("data.train_files", config.data.train_files)
        _require_files("data.val_files", config.data.val_files)
    _require_run_folder(config.trainer)
    # Workers on a cluster have working directories of their own.
    folder = str(Path(config.trainer.default_local_dir).resolve())
    config = replace(config, model=_absolute(config.model), trainer=replace(config.trainer, default_local_dir=folder))
    for group in ("critic", "reward_model"):
        if getattr(config, f"uses_{group}", False):
            part = getattr(config, group)
            require_model(f"{group}.model.path", part.model.path)
            config = replace(config, **{group: replace(part, model=_absolute(part.model))})
    return config  # type: ignore[no-any-return]


def _with_full_paths(config: Any) -> Any:
    """The config with full paths of the code that workers load too; on a cluster their working directories differ."""
    actor: Any = getattr(config, "actor", None)
    calculator: Any = getattr(config, "calculator", None)
    if hasattr(actor, "kl_loss_type"):
        config = replace(config, actor=replace(actor, kl_loss_type=full_path(actor.kl_loss_type)))
    if hasattr(calculator, "own_metrics"):
        metrics = [full_path(path) for path in calculator.own_metrics]
        config = replace(config, calculator=replace(calculator, own_metrics=metrics))
    return config


def full_path(path: str) -> str:
    """The import path of the user's code with the full path of its file; a name or a module stays as it is."""
    file, colon, attribute = path.rpartition(":")
    return f"{Path(file).resolve()}:{attribute}" if colon and file.endswith(".py") else path


def _absolute(model: Any) -> Any:
    """The model's config with a local folder's full path; a hub id stays as it is."""
    folder = Path(model.path)
    return replace(model, path=str(folder.resolve())) if folder.exists() else model


def _require_files(field: str, paths: Sequence[str]) -> None:
    for path in paths:
        if hub_set(path) is None and not Path(path).is_file():
            shipped = (
                "restore the shipped data with `git checkout data`, or " if Path(path).parts[:1] == ("data",) else ""
            )
            raise ConfigError(
                f"{field}={path!r}: no such file; {shipped}name a parquet, jsonl or json file, or a hub set such as "
                "owner/name:config:split"
            )


def _require_run_folder(trainer: RunConfig) -> None:
    """Check that no run is overwritten: the folder is new, or holds the run that ``trainer.resume_mode`` resumes.

    A run that ended before its first checkpoint has nothing to overwrite.
    """
    folder = Path(trainer.default_local_dir)
    require_folder("trainer.default_local_dir", trainer.default_local_dir)
    if not folder.exists() or (folder.is_dir() and all(map(_is_temporary, folder.iterdir()))):
        return
    field = f"trainer.default_local_dir={trainer.default_local_dir!r}"
    fix = "name another folder or remove it"
    if trainer.resume_mode == "disable":
        raise ConfigError(f"{field}: already holds a run; {fix}")
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


def require_folder(field: str, path: str) -> None:
    """Raise ``ConfigError`` for a folder that could not be made, or not be written into; makes nothing itself."""
    fix = "name a folder that can be made and written"
    if not path.strip():
        raise ConfigError(f"{field}={path!r}: is empty; {fix}")
    try:
        # The nearest part that is there decides.
        existing = next(part for part in [Path(path).absolute(), *Path(path).absolute().parents] if _is_there(part))
    except OSError as error:
        raise ConfigError(f"{field}={path!r:.200}: {error.strerror}; {fix}") from error
    if not existing.is_dir():
        raise ConfigError(f"{field}={path!r:.200}: {existing} is a file; {fix}")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"{field}={path!r:.200}: {existing} cannot be written; {fix}")


def _is_there(path: Path) -> bool:
    """As ``exists``, but raises ``OSError`` for names that no file can have."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def is_requeued(trainer: RunConfig) -> bool:
    """Whether the folder holds this very run, begun from the same ``resume_from_path``: its own checkpoints count."""
    if trainer.resume_mode != "path":
        return False
    try:
        saved = read_run_config(Path(trainer.default_local_dir) / RUN_CONFIG)
    except ConfigError:
        return False
    return bool(run_option(saved, "trainer", "resume_from_path") == trainer.resume_from_path)


def _is_temporary(path: Path) -> bool:
    """Whether an entry of a run's folder is its lock or attempt, or was being written when the run was killed."""
    return path.name in (LOCK, ATTEMPT) or (path.name.startswith(".") and path.name.endswith(".unfinished"))


def require_model(field: str, path: str) -> None:
    """Raise ``ConfigError`` naming ``field`` for a folder without a model; a hub id (``owner/name``) is accepted.

    A name below ``data/`` is a folder even if that is missing: the shipped model lies there.
    """
    folder = Path(path)
    hub_id = len(folder.parts) == 2 and not folder.is_absolute() and not folder.parent.exists()
    hub_id = hub_id and not _in_data(folder)
    _refuse_shards_of_verl(field, folder)
    if not hub_id and not (folder / "config.json").is_file():
        shipped = "restore the shipped model with `git checkout data`, or " if _in_data(folder) else ""
        raise ConfigError(
            f"{field}={path!r}: no config.json there; {shipped}name a folder saved by save_pretrained or a hub id such "
            "as Qwen/Qwen2.5-1.5B"
        )


def _refuse_shards_of_verl(field: str, folder: Path) -> None:
    """Raise ``ConfigError`` if the model in a checkpoint of veRL has not been merged from its shards."""
    if any(folder.glob("*.safetensors")):
        return
    for part in (folder.parent, folder, folder / "actor"):
        if any(part.glob("model_world_size_*_rank_0.pt")) and not any((part / "huggingface").glob("*.safetensors")):
            raise ConfigError(
                f"{field}={str(folder)!r}: a checkpoint of veRL whose model is in shards; merge them with `verl-export "
                f"merge --backend fsdp --local_dir {part} --target_dir merged`, and name merged"
            )
    for exported in (folder / "huggingface", folder / "actor" / "huggingface"):
        if not (folder / "config.json").is_file() and (exported / "config.json").is_file():
            raise ConfigError(f"{field}={str(folder)!r}: is part of a checkpoint; name its model, {exported}")


def _in_data(path: Path) -> bool:
    """Whether the path is below ``data/``, where the shipped data and model are."""
    return path.parts[:1] == ("data",)


class _Parser:
    """Builds ``schema`` from plain values; ``above`` is what comes before its options in messages."""

    def __init__(self, schema: Any, above: str = "") -> None:
        self.schema, self.above = schema, above

    def build(self, group: Any, values: Any, path: str) -> Any:
        """An instance of the dataclass ``group``, whose dotted name is ``path``, empty for that of all options."""
        if not isinstance(values, dict):
            raise ConfigError(f"{path}={values!r}: must be a group of options: {', '.join(get_type_hints(group))}")
        prefix, hints = f"{path}." if path else "", get_type_hints(group)
        for key, value in values.items():
            if key not in hints:
                self._refuse(f"{prefix}{key}", value, hints)
        for key in hints:
            if key not in values:
                raise ConfigError(f"{prefix}{key}: {_NO_VALUE}")
        converted = {key: self._convert(hint, values[key], f"{prefix}{key}") for key, hint in hints.items()}
        try:
            return group(**converted)
        except ConfigError as error:  # names an option within its group
            raise ConfigError(f"{prefix}{error}") from error

    def _refuse(self, name: str, value: Any, siblings: Iterable[str]) -> None:
        fix = (
            unsupported(name, value)
            or nearest_option(self.schema, name.removeprefix(self.above), above=self.above)
            or f"known here: {', '.join(siblings)}"
        )
        raise ConfigError(f"{' '.join(name.splitlines())}={value!r:.200}: unknown key; {fix}")

    def _convert(self, hint: Any, value: Any, path: str) -> Any:
        """Check ``value`` against the type ``hint``; an integer passes as a float, one element as a list of one."""
        kind, parts = get_origin(hint), get_args(hint)
        if hint is Any:
            return value
        if kind in (UnionType, Union):  # X | None; Union where X is a Literal
            (inner,) = (part for part in parts if part is not NoneType)
            return None if value is None else self._convert(inner, value, path)
        if is_dataclass(hint):
            return self.build(hint, value, path)
        if kind is list:
            items = value if isinstance(value, list) else [value]
            return [self._convert(parts[0], item, f"{path}[{i}]") for i, item in enumerate(items)]
        if kind is dict:
            if not isinstance(value, dict):
                raise ConfigError(f"{path}={value!r}: must be a mapping, name: value")
            return {str(key): self._entry(parts[1], entry, f"{path}.{key}") for key, entry in value.items()}
        return _scalar(str if kind is Literal else hint, value, path)

    def _entry(self, hint: Any, value: Any, path: str) -> Any:
        """One entry of a mapping; similar options of a dataclass in it are looked for there alone."""
        parser = _Parser(hint, f"{path}.") if is_dataclass(hint) else self
        return parser._convert(hint, value, path)


def _scalar(kind: type, value: Any, path: str) -> Any:
    if kind is float and type(value) in (int, float):
        if not abs(value) <= LARGEST_NUMBER:  # NaN is not either
            limit = f"up to {LARGEST_NUMBER:g} in size, as in float32"
            raise ConfigError(f"{path}={value!r:.60}: must be a finite number {limit}")
        return float(value)
    if type(value) is not kind:
        raise ConfigError(f"{path}={value!r}: must be {_TYPE_NAMES[kind]}, not {type(value).__name__}")
    if kind is int and abs(value) > LARGEST_INTEGER:
        raise ConfigError(f"{path}={value!r:.60}: must be an integer up to {LARGEST_INTEGER} in size")
    if kind is str and "\0" in value:
        raise ConfigError(f"{path}={value!r}: must not hold the character NUL; leave it out")
    return value
