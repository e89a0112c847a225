"""Validates options: rules in annotations check single fields, and ``require`` calls check combinations of fields.

Each error message contains the field, its value and a fix.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from operator import attrgetter
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from verl.config.errors import ConfigError, Mistakes


def require(condition: bool, field: str, value: object, fix: str) -> None:
    """Raise ``ConfigError("field=value: fix")`` unless ``condition`` holds."""
    if not condition:
        raise ConfigError(f"{field}={value!r}: {fix}")


UNSUPPORTED = {
    *("sglang", "trtllm", "tensorrt_llm", "lmdeploy", "megatron"),
    *("trackio", "comet_ml", "clearml", "neptune", "aim", "dvclive", "vemlp_wandb", "rl_insight"),
}
"""Engines and experiment trackers that other frameworks support but this one does not."""


def require_choice(field: str, value: str, choices: Sequence[str], or_else: str = "") -> None:
    """Raise a ``ConfigError`` that lists the choices and suggests the nearest one if ``value`` is not among them."""
    if value in choices:
        return  # fast path, because this runs for each record of a data file
    near = get_close_matches(value, choices, n=1)
    hint = f"; did you mean {near[0]!r}?" if near and value not in UNSUPPORTED else ""
    known = "is not supported; " if value in UNSUPPORTED else ""
    require(False, field, value, f"{known}must be one of {', '.join(choices)}{or_else}{hint}")


def require_import_path(field: str, value: str) -> None:
    """Raise ``ConfigError`` unless ``value`` looks like an import path."""
    module, _, attribute = value.rpartition(":")
    fix = "an import path is module:attribute or file.py:attribute"
    require(bool(module) and all(part.isidentifier() for part in attribute.split(".")), field, value, fix)


def require_custom_kwargs(field: str, value: str | None, options: Mapping[str, Any]) -> None:
    """Raise ``ConfigError`` if ``<field>_kwargs`` is set without custom code, or a key is not a valid argument name."""
    kwargs, fix = f"{field}_kwargs", f"are for your own {field}=module:attribute; set that, or leave them out"
    require(not options or (value is not None and ":" in value), kwargs, dict(options), fix)
    for name, option in options.items():
        require(name.isidentifier(), f"{kwargs}.{name}", option, "its name must be that of a keyword argument")


Check = Callable[[str, Any], None]
"""Function that receives a field's name and value and raises ``ConfigError`` if the value is invalid."""


def rule(holds: Callable[[Any], bool], fix: str) -> Check:
    """Return a check that requires ``holds(value)``, as in ``Annotated[int, rule(is_even, "must be even")]``."""
    return lambda field, value: require(holds(value), field, value, fix)


def within(interval: str) -> Check:
    """Return a check that a value is in an interval such as ``(0, 1]``, which excludes 0 and includes 1."""
    low, high = map(float, interval[1:-1].split(","))
    opens, closes = interval[0] == "(", interval[-1] == ")"
    return rule(
        lambda value: low <= value <= high and not (opens and value == low) and not (closes and value == high),
        f"must be in {interval}",
    )


def custom_or(names: Sequence[str]) -> Check:
    """Return a check that a value is one of ``names`` or an import path of custom code."""
    or_else = ", or your own as module:attribute or file.py:attribute"

    def check(field: str, value: str) -> None:
        if ":" in value:
            require_import_path(field, value)
        else:
            require_choice(field, value, names, or_else)

    return check


_YEAR_S = 31536000
_TIME = f"and at most {_YEAR_S} seconds, a year"
POSITIVE = rule(lambda value: value > 0, "must be greater than 0")
NOT_NEGATIVE = rule(lambda value: value >= 0, "must be at least 0")

PositiveInt = Annotated[int, POSITIVE]
PositiveFloat = Annotated[float, POSITIVE]
NotNegativeInt = Annotated[int, NOT_NEGATIVE]
NotNegativeFloat = Annotated[float, NOT_NEGATIVE]
Share = Annotated[float, within("(0, 1]")]
Probability = Annotated[float, within("[0, 1]")]
CountOrAll = Annotated[int, rule(lambda value: value == -1 or value > 0, "must be -1 or at least 1")]
StepNumber = Annotated[int, rule(lambda value: value > 0, "steps are counted from 1")]
# System timers overflow at about 300 years.
Seconds = Annotated[float, rule(lambda value: 0 < value <= _YEAR_S, f"must be greater than 0, {_TIME}")]
SecondsOrZero = Annotated[float, rule(lambda value: 0 <= value <= _YEAR_S, f"must be at least 0, {_TIME}")]
IS_FOLDER_NAME = rule(
    lambda name: re.fullmatch(r"[A-Za-z0-9][\w.+-]*", name, re.ASCII) is not None,
    "must name a folder: only letters, digits and . _ + -",
)
FolderName = Annotated[str, IS_FOLDER_NAME]
NAMES_ONE = rule(lambda values: len(values) > 0, "name at least one")
NAMES_ONCE = rule(lambda values: len(set(values)) == len(values), "name each once")


@dataclass(frozen=True)
class Group:
    """Base class of option groups, which validates fields and then calls the ``check`` method of each class in the MRO.

    Option names in error messages are relative to the group, and the parser prepends the group's name.
    """

    def __post_init__(self) -> None:
        group: Any = type(self)
        mistakes = Mistakes()
        for option, hint in _annotations(group).items():
            with mistakes.collected():
                _check_value(hint, getattr(self, option), option)
        mistakes.raise_all()
        for kind in reversed(group.__mro__):
            if "check" in vars(kind):
                vars(kind)["check"](self)

    def require(self, condition: bool, option: str, fix: str) -> None:
        """Raise ``ConfigError`` for the dotted ``option`` of this group unless ``condition`` holds."""
        require(condition, option, attrgetter(option)(self), fix)


@cache
def _annotations(group: type[Group]) -> dict[str, Any]:
    return get_type_hints(group, include_extras=True)


def _check_value(hint: Any, value: Any, field: str) -> None:
    """Check a value of the right type against the rules and choices in an annotation."""
    kind, parts = get_origin(hint), get_args(hint)
    if kind is Annotated:
        _check_value(parts[0], value, field)
        for check in parts[1:]:
            check(field, value)
    elif kind in (UnionType, Union) and value is not None:  # X | None is a Union if X is a Literal
        _check_value(next(part for part in parts if part is not type(None)), value, field)
    elif kind is Literal:
        require_choice(field, value, parts)
    elif kind is list:
        for i, entry in enumerate(value):
            _check_value(parts[0], entry, f"{field}[{i}]")


def join_source(source: str, value: str) -> str:
    """Return an entry of a list option that has a value for each data source, such as ``teacher.by_source``."""
    return f"{source.replace('=', '==')}={value}"


def split_source(entry: str) -> tuple[str, str]:
    """Split an entry of such a list at its first single ``=`` into data source and value, "" if there is no ``=``."""
    parts = re.fullmatch(r"((?:[^=]|==)*)=(?!=)(.*)", entry, re.DOTALL)
    return (entry, "") if parts is None else (parts[1].replace("==", "="), parts[2])
