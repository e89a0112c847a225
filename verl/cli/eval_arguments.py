"""The command line of ``eval.sh``, before Hydra reads it."""

from collections.abc import Sequence
from dataclasses import is_dataclass
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from verl.cli.translate import MULTIRUN, sort_arguments
from verl.cli.values import FlagError

LITERAL = ("[", "{", "'", '"', "$")
"""First characters of a value that is passed to Hydra unchanged."""


def plain_arguments(arguments: Sequence[str], schema: type) -> list[str]:
    """``arguments`` in Hydra's form, where users may write less than Hydra demands.

    ``benchmarks=a,b`` becomes ``benchmarks=[a,b]`` if the option is a list, except in a sweep; ``runs.mine.path=x``
    becomes ``++runs.mine.path=x``, and ``runs={...}`` alike, because the entries of the mapping may be new; Hydra's own
    flags come last.

    Raises:
        FlagError: a flag that is not Hydra's.
    """
    line = sort_arguments(arguments)
    if line.flags:
        raise FlagError(f"--{next(iter(line.flags))}: is a flag of train.sh; set options as in model.path=VALUE")
    sweeps = bool(MULTIRUN & set(line.hydra))
    return [*(_plain(override, schema, sweeps) for override in line.overrides), *line.hydra]


def _plain(override: str, schema: type, sweeps: bool) -> str:
    key, has_value, value = override.partition("=")
    if not has_value or key.startswith("~"):
        return override
    hint, in_mapping = _option(schema, key.lstrip("+"))
    # ++runs={...} adds to a mapping; without it Hydra takes only entries that are there.
    new_entries = in_mapping or (get_origin(hint) is dict and value.startswith("{"))
    if new_entries and not key.startswith("+"):
        key = f"++{key}"
    if get_origin(hint) is list and "," in value and not sweeps and not value.startswith(LITERAL):
        value = f"[{value.strip(',')}]"
    return f"{key}={value}"


def _option(schema: Any, key: str) -> tuple[Any, bool]:
    """Return the type of an option, None if it does not exist; and whether it is in an entry of a mapping."""
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
