"""The command line of the entry points: Hydra's, with one-line messages for wrong overrides."""

import os
import sys
from collections.abc import Callable

from hydra.errors import HydraException

from verl.config.errors import ConfigError
from verl.config.load import CONFIG_DIR
from verl.config.overrides import check_group_values, explain, option_names

RUN_FOLDER = "trainer.default_local_dir"
"""The option that names a run's folder."""


def run_hydra(main: Callable[[], None], schema: type) -> None:
    """Call ``main``, a function decorated by ``hydra.main``; a wrong override ends the process with one line.

    With ``--multirun``, Hydra calls it once per job, and the folder that Hydra creates for a job becomes its run's
    folder.

    Raises:
        SystemExit: with that line, if the overrides cannot be composed.
    """
    if {"-m", "--multirun"} & set(sys.argv) and RUN_FOLDER in option_names(schema, ""):
        # The config itself cannot hold this value: outside a sweep Hydra creates no such folder. It is inserted before
        # the first override, because Hydra expects overrides next to each other and the user's own choice must win.
        overrides = (i for i, word in enumerate(sys.argv) if i and "=" in word and not word.startswith("-"))
        sys.argv.insert(next(overrides, len(sys.argv)), f"{RUN_FOLDER}=${{hydra:runtime.output_dir}}")
    try:
        check_group_values(schema, CONFIG_DIR, sys.argv[1:])
    except ConfigError as error:
        raise SystemExit(f"error: {error}") from None
    # Without this, Hydra prints its own message and exits.
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    try:
        main()
    except HydraException as error:
        raise SystemExit(f"error: {explain(error, schema)}") from None
