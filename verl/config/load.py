"""Parses and validates configs, converting untyped Hydra configs to frozen dataclasses."""

import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import is_dataclass, replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from verl.config.errors import ConfigError, Mistakes, in_one_line
from verl.config.old_names import REMOVED, rename_options, with_new_names
from verl.config.paths import SHIPPED, find_model, find_path

CONFIG_DIR = SHIPPED / "configs"
"""Folder of the built-in YAML files."""
EMBEDDED_MODELS = [(SHIPPED / "data" / name).resolve() for name in ("tiny_model", "tiny_tool_model", "tiny_teacher")]
PROCESSOR = Path("/proc/cpuinfo")

ConfigT = TypeVar("ConfigT")
LARGEST_INTEGER = 2**32 - 1
"""Largest integer accepted as an option, such as a seed; engines may multiply integers and store them in 64 bits."""
LARGEST_NUMBER = 3.4e38
_REFERENCE = re.compile(r"\$\{([\w.]+)\}")
"""Pattern of a value that refers to another option, such as ``${model.path}``."""
_NO_VALUE = "has no value; set it in the YAML or on the command line"
_WRITE = "; write option=value, in quotes where the value has special characters: 'option=\"a b\"'"
_TYPE_NAMES = {int: "an integer", float: "a number", bool: "true or false", str: "text"}


def share_of(share: float, length: Any) -> int:
    """Return a fraction of a length, at least 1, as in ``${share_of:0.2,${data.max_response_length}}``."""
    return max(1, int(share * length)) if type(length) is int else 1


def at_least(least: int, *lengths: Any) -> int:
    """Return the maximum of a number and a sum of lengths, as in the YAML value ``${at_least:16384,${a},${b}}``."""
    return max(least, sum(length for length in lengths if type(length) is int))


_FITTED: dict[tuple[str, str], tuple[int, str]] = {}
"""Values that :func:`fitting` returned, with notes to print if they are used, keyed by option and model. Hydra also
evaluates unused values, such as those overridden on the command line."""


@cache
def fitting(option: str, length: int, total: int, path: str) -> int:
    """Return an option's ``length`` in tokens, scaled down if a local model supports fewer than ``total`` tokens.

    Use it in YAML as ``${fitting:data.max_prompt_length,512,1536,${model.path}}``.
    """
    try:
        limit = json.loads(Path(find_model(str(path)), "config.json").read_text())["max_position_embeddings"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):  # a hub id, or a malformed file
        return length
    if type(limit) is not int or not 0 < limit < total:
        return length
    fitted = max(1, length * limit // total)
    note = f"note: {option}={fitted} of the preset's {length}: the model takes {limit} tokens in all"
    _FITTED[option, str(path)] = fitted, note
    return fitted


def _value_at(tree: Any, option: str) -> Any:
    """Return the value of a dotted option in nested mappings, or None if it is missing."""
    for name in option.split("."):
        tree = tree.get(name) if isinstance(tree, dict) else None
    return tree


def _print_fitted(values: Any) -> None:
    """Print a note for each config value that :func:`fitting` scaled down, but only once per value."""
    path = str(_value_at(values, "model.path"))
    for option in [option for option, of_model in _FITTED if of_model == path]:
        if _value_at(values, option) == _FITTED[option, path][0]:
            print(_FITTED.pop((option, path))[1], file=sys.stderr)


def is_embedded(model_path: str) -> bool:
    """Return whether the path is that of one of the tiny models shipped with the package."""
    return Path(find_path(model_path)).resolve() in EMBEDDED_MODELS


def by_model(path: Any, embedded: Any, pretrained: Any) -> Any:
    """Choose the value for the kind of model, as in the YAML value ``${by_model:${model.path},2.0e-3,1.0e-5}``."""
    return embedded if is_embedded(str(path)) else pretrained


def fast_dtype(device: str) -> str:
    """Return ``bfloat16``, or ``float32`` on CPUs without bfloat16, as in the YAML value ``${fast_dtype:${device}}``.

    ``auto`` counts as a GPU if this machine has a GPU device file, or if there is a cluster, which may have GPUs.
    """
    elsewhere = any(os.environ.get(name) not in (None, "", "local") for name in ("RAY_ADDRESS", "NNODES"))
    # Device files of NVIDIA GPUs, AMD GPUs, and GPUs in WSL.
    gpu = elsewhere or any(any(Path("/dev").glob(name)) for name in ("nvidia[0-9]*", "kfd", "dxg"))
    if device == "cuda" or (device == "auto" and gpu):
        return "bfloat16"
    flags = PROCESSOR.read_text().split() if PROCESSOR.exists() else []
    return "bfloat16" if {"amx_bf16", "avx512_bf16", "bf16"} & {*flags} else "float32"


# The resolvers accept lengths of any type, because the parser rejects wrong types with a better message.
for resolver in (share_of, at_least, fitting, by_model, fast_dtype):
    OmegaConf.register_new_resolver(resolver.__name__, resolver, replace=True)


def parse_config(schema: type[ConfigT], tree: DictConfig) -> ConfigT:
    """Convert a composed Hydra config to an instance of the dataclass ``schema``.

    Raises ``ConfigError`` if a key is unknown or missing, a value has the wrong type, or options are inconsistent.
    """
    try:
        values = OmegaConf.to_container(tree, resolve=True, throw_on_missing=True)
    except MissingMandatoryValue as error:
        raise ConfigError(f"{error.full_key}: {_NO_VALUE}") from error
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key}: {str(error).splitlines()[0]}") from error
    rename_options(values)
    _print_fitted(values)
    try:
        config: ConfigT = _with_full_paths(parse_values(schema, values))
    except ConfigError as error:
        raise ConfigError("\n".join(_without_inherited(str(error).splitlines(), tree))) from error
    return config


def _without_inherited(lines: list[str], tree: DictConfig) -> list[str]:
    """Drop errors about options whose values refer to another invalid option, as in ``${model.path}``."""
    options = [re.split("[=:]", line, maxsplit=1)[0] for line in lines]
    raw, wrong = OmegaConf.to_container(tree, resolve=False), {*options}

    def source(option: str) -> str:
        value = _value_at(raw, option)
        match = _REFERENCE.fullmatch(value) if isinstance(value, str) else None
        return match[1] if match else ""

    return [line for line, option in zip(lines, options, strict=True) if source(option) not in wrong]


def parse_values(schema: type[ConfigT], values: Any) -> ConfigT:
    """Convert plain values to an instance of the dataclass ``schema``. Raises the errors of :func:`parse_config`."""
    config: ConfigT = _Parser(schema).build(schema, values, "")
    return config


def compose_config(schema: type, name: str, overrides: Sequence[str] = (), with_hydra: bool = False) -> DictConfig:
    """Compose ``configs/<name>.yaml`` with Hydra ``overrides``. ``with_hydra`` includes the config group ``hydra``.

    Raises ``ConfigError`` if an override is invalid.
    """
    check_group_values(overrides)
    overrides = with_new_names(overrides)
    with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        try:
            return compose(name, overrides=overrides, return_hydra_config=with_hydra)
        except HydraException as error:
            raise ConfigError(explain(error, schema)) from error
        # Hydra raises these errors for overrides such as "=5", int(x), and integers with thousands of digits.
        except (ValueError, TypeError, AttributeError, AssertionError, ArithmeticError, RecursionError) as error:
            raise ConfigError(f"{' '.join(overrides):.200}: {in_one_line(error)}; write option=value") from error


def load_config(schema: type[ConfigT], name: str, overrides: Sequence[str] = ()) -> ConfigT:
    """Compose ``configs/<name>.yaml`` with Hydra ``overrides`` and parse it into ``schema``.

    Raises ``ConfigError`` as in ``compose_config`` and ``parse_config``.
    """
    return parse_config(schema, compose_config(schema, name, overrides))


def _with_full_paths(config: Any) -> Any:
    """Make the paths of custom code absolute, because workers may run in different working directories."""
    actor: Any = getattr(config, "actor", None)
    calculator: Any = getattr(config, "calculator", None)
    if hasattr(actor, "kl_loss_type"):
        config = replace(config, actor=replace(actor, kl_loss_type=full_path(actor.kl_loss_type)))
    if hasattr(calculator, "own_metrics"):
        metrics = [full_path(path) for path in calculator.own_metrics]
        config = replace(config, calculator=replace(calculator, own_metrics=metrics))
    return config


def full_path(path: str) -> str:
    """Return an import path with an absolute file path. Names and module paths remain unchanged."""
    file, colon, attribute = path.rpartition(":")
    return f"{Path(find_path(file)).resolve()}:{attribute}" if colon and file.endswith(".py") else path


class _Parser:
    """Parser that builds ``schema`` from plain values. ``above`` is the prefix of option names in error messages."""

    def __init__(self, schema: Any, above: str = "") -> None:
        self.schema, self.above = schema, above

    def build(self, group: Any, values: Any, path: str) -> Any:
        """Return an instance of the dataclass ``group``, whose dotted name is ``path`` (empty for the root)."""
        if not isinstance(values, dict):
            raise ConfigError(f"{path}={values!r}: must be a group of options: {', '.join(get_type_hints(group))}")
        prefix, hints = f"{path}." if path else "", get_type_hints(group)
        for key, value in values.items():
            if key not in hints:
                name = f"{prefix}{key}"
                near = nearest_option(self.schema, name.removeprefix(self.above), above=self.above)
                raise ConfigError(f"{' '.join(name.splitlines())}={value!r:.200}: unknown key; {near}")
        for key in hints:
            if key not in values:
                raise ConfigError(f"{prefix}{key}: {_NO_VALUE}")
        converted, mistakes = {}, Mistakes()
        for key, hint in hints.items():
            with mistakes.collected():
                converted[key] = self._convert(hint, values[key], f"{prefix}{key}")
        mistakes.raise_all()
        try:
            return group(**converted)
        except ConfigError as error:  # the error names options relative to the group
            raise ConfigError("\n".join(f"{prefix}{line}" for line in str(error).splitlines())) from error

    def _convert(self, hint: Any, value: Any, path: str) -> Any:
        """Convert ``value`` to the type ``hint``, for example an integer to a float or a single value to a list."""
        kind, parts = get_origin(hint), get_args(hint)
        if hint is Any:
            return value
        if kind in (UnionType, Union):  # X | None is a Union if X is a Literal
            kinds = [part for part in parts if part is not NoneType]  # one, or text and a mapping
            inner = next((part for part in kinds if (get_origin(part) is dict) == isinstance(value, dict)), kinds[0])
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
        """Convert an entry of a mapping. Error messages for a dataclass suggest only options of that dataclass."""
        parser = _Parser(hint, f"{path}.") if is_dataclass(hint) else self
        return parser._convert(hint, value, path)


def _scalar(kind: Any, value: Any, path: str) -> Any:
    if kind is float and type(value) in (int, float):
        if not abs(value) <= LARGEST_NUMBER:  # also true for NaN
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


# Error messages for overrides that do not match the schema.


def explain(error: HydraException, schema: type) -> str:
    """Return Hydra's error as one line; if a key is unknown, the line suggests the nearest known key."""
    cause = error.__cause__
    key = cause.full_key if isinstance(cause, OmegaConfBaseException) else None
    if not key:
        # If an override cannot be parsed, Hydra links to its grammar, which does not help users.
        line = re.sub(r" See https://hydra\S+ for details", _WRITE, " ".join(str(error).split()))
        found = re.search(r"Could not find '([^']+)' Available options in '[^']+': ([^']+?) Config search path", line)
        text = line.partition(" at input ")[2].partition("; ")[0].strip("'")
        if re.match(r"\[[^\]\"']*=", text):
            return f"{text}: an entry of a list that contains = needs quotes of its own: 'option=[\"a=b\"]'"
        if text.count("[") > text.count("]"):
            return f"{text}: its [ is not closed; write lists in quotes: 'option=[a,b]'"
        if not found:
            return line
        (group, _, name), files = found[1].rpartition("/"), found[2].split()
        near = get_close_matches(name, files, n=1, cutoff=0.75)  # other models have similar names
        hint = f"; did you mean {near[0]}?" if near else "; or model.path=FOLDER_OR_HUB_ID" * (group == "model")
        return f"{group}={name}: must be one of {', '.join(files)}{hint}"
    # Hydra's full_key stops at the first unknown part; its message contains the whole name.
    found = re.search(r"Could not override '([^']+)'", str(error))
    whole = found[1] if found and found[1].startswith(key) else key
    known = list(option_names(schema, ""))
    if key in known:
        return f"{key}: must be {_form(schema, key)}"
    group = key.rpartition(".")[0]
    if group in known and not any(name.startswith(f"{group}.") for name in known):
        return f"{key}: unknown key; a new entry of {group} needs a plus: +{key}=..."
    return f"{key}: unknown key; {nearest_option(schema, key, whole)}"


def _form(schema: Any, key: str) -> str:
    """Describe the type of value that an option accepts."""
    hint = schema
    for part in key.split("."):
        hint = get_type_hints(hint)[part]
    mapping = is_dataclass(hint) or get_origin(hint) is dict
    return "a mapping, {name: value}" if mapping else "a list, [a,b]" if get_origin(hint) is list else "a single value"


def check_group_values(words: Sequence[str]) -> None:
    """Raise ``ConfigError`` if a config group is set to a number, list or null, because Hydra's error is unclear."""
    for word in words:
        group, _, value = word.lstrip("+").partition("=")
        folder = CONFIG_DIR / group.partition("@")[0]
        # os.path.isdir returns False for names that no file can have.
        files = sorted(path.stem for path in folder.glob("*.yaml")) if os.path.isdir(folder) else []
        names_none = re.fullmatch(r"null|true|false|[-+.\d]+|\[.*", value) and (group, value) != ("experiment", "null")
        if group and files and names_none:
            raise ConfigError(f"{group}={value}: must be one of {', '.join(files)}")


def nearest_option(schema: type, key: str, whole: str = "", above: str = "") -> str:
    """Suggest options that resemble the unknown ``key``, or list all options in its group.

    An identical name in another group takes precedence over a similar name in the same group.

    Args:
        whole: Full option name if ``key`` is only the unknown group in it.
        above: Prefix of option names in messages.
    """
    if key in REMOVED:
        return REMOVED[key]
    known, name = list(option_names(schema, "")), whole or key
    group, _, leaf = key.rpartition(".")
    siblings = [option.rpartition(".")[2] for option in known if option.rpartition(".")[0] == group]
    same = [o for o in known if f".{o}".endswith(f".{name}") or o.replace(".", "_") == name.replace(".", "_")]
    if not same and name == key:
        same = [option for option in known if option.rpartition(".")[2] == leaf]
    if not same:
        words = {*leaf.split("_")}
        same = [f"{group}.{name}".lstrip(".") for name in siblings if words <= {*name.split("_")}]
    if not same:
        same = [f"{group}.{near}".lstrip(".") for near in get_close_matches(leaf, siblings, n=1)]
    if not same:
        return f"known here: {', '.join(siblings)}"
    return f"did you mean {' or '.join(above + option for option in same[:4])}?"


def option_names(schema: Any, prefix: str) -> Iterator[str]:
    """Yield the dotted names of all options in ``schema``."""
    for name, hint in get_type_hints(schema).items():
        yield f"{prefix}{name}"
        if is_dataclass(hint):
            yield from option_names(hint, f"{prefix}{name}.")
