"""Converts ``eval.sh``'s command line to Hydra's syntax."""

from collections.abc import Sequence
from dataclasses import is_dataclass
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from verl.cli.translate import MULTIRUN, require_one_configuration, sort_arguments
from verl.cli.values import FlagError

LITERAL = ("[", "{", "'", '"', "$")
"""First characters of values that are passed to Hydra unchanged."""


def plain_arguments(arguments: Sequence[str], schema: type) -> list[str]:
    """Convert shorthand ``arguments`` to Hydra's syntax.

    Except in sweeps, comma-separated values of list options become lists: ``benchmarks=a,b`` becomes
    ``benchmarks=[a,b]``. ``runs.mine.path=x`` becomes ``++runs.mine.path=x``, and ``runs={...}`` becomes
    ``++runs={...}``, because mapping entries may be new. Hydra's flags are moved to the end.

    Raises ``FlagError`` if a flag is not one of Hydra's flags.
    """
    line = sort_arguments(arguments)
    if line.flags:
        raise FlagError(f"--{next(iter(line.flags))}: is no flag of eval.sh; set options as in model.path=VALUE")
    sweeps = bool(MULTIRUN & set(line.hydra))
    require_one_configuration(line)
    return [*(_plain(override, schema, sweeps) for override in line.overrides), *line.hydra]


def _plain(override: str, schema: type, sweeps: bool) -> str:
    key, has_value, value = override.partition("=")
    if not has_value or key.startswith("~"):
        return override
    hint, in_mapping = _option(schema, key.lstrip("+"))
    # ++runs={...} adds entries to a mapping; without ++, Hydra accepts only existing entries.
    new_entries = in_mapping or (get_origin(hint) is dict and value.startswith("{"))
    if new_entries and not key.startswith("+"):
        key = f"++{key}"
    if get_origin(hint) is list and "," in value and not sweeps and not value.startswith(LITERAL):
        value = f"[{value.strip(',')}]"
    return f"{key}={value}"


def _option(schema: Any, key: str) -> tuple[Any, bool]:
    """Return an option's type, or None if it does not exist, and whether the option is inside a mapping entry."""
    hint, in_mapping = schema, False
    for part in key.split("."):
        if get_origin(hint) is dict:
            hint, in_mapping = get_args(hint)[1], True
        elif is_dataclass(hint):
            hint = get_type_hints(hint).get(part)
        else:
            hint = None
        if get_origin(hint) is UnionType:
            hint = get_args(hint)[0]
    return hint, in_mapping
