"""The command line of the entry points: Hydra's, with wrong overrides explained in one line."""

import os
import re
import sys
from collections.abc import Callable
from dataclasses import is_dataclass
from typing import get_type_hints

from hydra.errors import HydraException

from verl.config.overrides import explain, option_names

RUN_FOLDER = "trainer.default_local_dir"
"""The option that names the folder of everything a run leaves behind."""


def run_hydra(main: Callable[[], None], schema: type) -> None:
    """Call ``main``, a function decorated by ``hydra.main``; an override that does not fit leaves with one line.

    With ``--multirun``, Hydra calls it once per job, and the folder that Hydra makes for a job becomes its run's.

    Raises:
        SystemExit: with that line; the overrides could not be composed.
    """
    if {"-m", "--multirun"} & set(sys.argv) and RUN_FOLDER in option_names(schema, ""):
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
