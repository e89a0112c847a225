"""The command line of the entry points: Hydra's, with wrong overrides explained in one line."""

import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from difflib import get_close_matches
from typing import Any, get_type_hints

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

RUN_FOLDER = "trainer.default_local_dir"
"""The option that names the folder of everything a run leaves behind."""


def run_hydra(main: Callable[[], None], schema: type) -> None:
    """Call ``main``, a function decorated by ``hydra.main``; an override that does not fit leaves with one line.

    With ``--multirun``, Hydra calls it once per job, and the folder that Hydra makes for a job becomes its run's.

    Raises:
        SystemExit: with that line; the overrides could not be composed.
    """
    if {"-m", "--multirun"} & set(sys.argv) and RUN_FOLDER in _keys(schema, ""):
        # The config itself cannot say it: outside a sweep Hydra makes no such folder. Before the first override: Hydra
        # takes them in one piece only, and the user's own choice must win.
        overrides = (i for i, word in enumerate(sys.argv) if i and "=" in word and not word.startswith("-"))
        sys.argv.insert(next(overrides, len(sys.argv)), f"{RUN_FOLDER}=${{hydra:runtime.output_dir}}")
    _refuse_values_of_groups(schema)
    # Hydra would print its own account and leave; with this it raises.
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    try:
        main()
    except HydraException as error:
        raise SystemExit(f"error: {explain(error, schema)}") from None


def _refuse_values_of_groups(schema: type) -> None:
    """Leave with one line for a group that is given a number or a list, over which Hydra itself stumbles."""
    hints = get_type_hints(schema)
    for word in sys.argv[1:]:
        group, _, value = word.partition("=")
        if is_dataclass(hints.get(group)) and re.fullmatch(r"[-+]?[\d.]+|\[.*\]", value):
            options = ", ".join(f"{group}.{name}" for name in get_type_hints(hints[group]))
            raise SystemExit(f"error: {group}={value}: names a group of options; set one of {options}")


def explain(error: HydraException, schema: type) -> str:
    """The key that does not exist, with the nearest one that does; or Hydra's own first line."""
    cause = error.__cause__
    key = cause.full_key if isinstance(cause, OmegaConfBaseException) else None
    if not key:
        return " ".join(str(error).split())
    group, _, name = key.rpartition(".")
    siblings = [known.rpartition(".")[2] for known in _keys(schema, "") if known.rpartition(".")[0] == group]
    prefix = f"{group}." if group else ""
    near = get_close_matches(name, siblings, n=1)
    mend = f"did you mean {prefix}{near[0]}?" if near else f"known there: {', '.join(siblings)}"
    return f"{key}: unknown key; {mend}"


def _keys(schema: Any, prefix: str) -> Iterator[str]:
    """Dotted names of every option below ``schema``."""
    for name, hint in get_type_hints(schema).items():
        yield f"{prefix}{name}"
        if is_dataclass(hint):
            yield from _keys(hint, f"{prefix}{name}.")
