"""Small checks that every config dataclass uses; each error names the field, the value and the fix."""

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Literal, get_args, get_origin, get_type_hints

from verl.config.errors import ConfigError

YEAR_S = 31536000
"""Longest time of an option, in seconds. Timers of the system take about 300 times as much."""


def require(condition: bool, field: str, value: object, fix: str) -> None:
    """Raise ``ConfigError("field=value: fix")`` unless ``condition`` holds."""
    if not condition:
        raise ConfigError(f"{field}={value!r}: {fix}")


def require_choice(field: str, value: str, choices: Sequence[str]) -> None:
    """Raise ``ConfigError`` naming the choices, and the nearest one, unless ``value`` is among them."""
    near = get_close_matches(value, choices, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    require(value in choices, field, value, f"must be one of {', '.join(choices)}{hint}")


def require_known(field: str, value: str, names: Sequence[str]) -> None:
    """Raise ``ConfigError`` unless ``value`` is among ``names`` or an import path, ``module:attribute``."""
    if ":" in value:
        require_import_path(field, value)
        return
    near = get_close_matches(value, names, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    fix = f"must be one of {', '.join(names)}, or your own as module:attribute or file.py:attribute{hint}"
    require(value in names, field, value, fix)


def require_import_path(field: str, value: str) -> None:
    """Raise ``ConfigError`` unless ``value`` has the form of an import path."""
    module, _, attribute = value.rpartition(":")
    fix = "an import path is module:attribute or file.py:attribute"
    require(bool(module) and all(part.isidentifier() for part in attribute.split(".")), field, value, fix)


def require_own(field: str, path: str | None, kwargs: Mapping[str, Any]) -> None:
    """Raise ``ConfigError`` unless ``path`` is None or an import path, and for ``kwargs`` without one."""
    if path is not None:
        require_import_path(field, path)
    require_own_options(field, path, kwargs)


def require_own_options(field: str, value: str | None, options: Mapping[str, Any]) -> None:
    """Raise ``ConfigError`` for ``options``, those of ``<field>_kwargs``, unless ``field`` names code of the user's own
    and each is a keyword."""
    kwargs, fix = f"{field}_kwargs", f"are for your own {field}=module:attribute; set that, or leave them out"
    require(not options or (value is not None and ":" in value), kwargs, dict(options), fix)
    for name, option in options.items():
        require(name.isidentifier(), f"{kwargs}.{name}", option, "its name must be that of a keyword argument")


def require_literals(group: str, config: object) -> None:
    """Raise ``ConfigError`` for a field of choices that has another value; the parser checks those it reads."""
    for name, hint in get_type_hints(type(config)).items():
        if get_origin(hint) is Literal:
            require_choice(f"{group}.{name}", getattr(config, name), get_args(hint))


def require_positive(field: str, value: float) -> None:
    """Raise ``ConfigError`` unless ``value > 0``."""
    require(value > 0, field, value, "must be greater than 0")


def require_not_negative(field: str, value: float) -> None:
    """Raise ``ConfigError`` unless ``value >= 0``."""
    require(value >= 0, field, value, "must be at least 0")


def require_seconds(field: str, value: float, zero: bool = False) -> None:
    """Raise ``ConfigError`` unless ``value`` is a time of at most a year, above 0 or, with ``zero``, 0."""
    least = "at least 0" if zero else "greater than 0"
    fix = f"must be {least}, and at most {YEAR_S} seconds, a year"
    require((value > 0 or (zero and value == 0)) and value <= YEAR_S, field, value, fix)


def require_distinct(field: str, values: Sequence[object]) -> None:
    """Raise ``ConfigError`` for an empty list, and for one that holds a value twice."""
    require(len(values) > 0, field, values, "name at least one")
    require(len(set(values)) == len(values), field, values, "name each once")
