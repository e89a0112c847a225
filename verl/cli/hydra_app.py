"""Runs entry points with Hydra's command line, and reports invalid overrides in one line."""

import os
import sys
from collections.abc import Callable
from typing import TypeVar

import hydra
from hydra.errors import HydraException
from omegaconf import DictConfig

from verl.config.errors import ConfigError, error_lines
from verl.config.load import CONFIG_DIR, check_group_values, explain, option_names

ConfigT = TypeVar("ConfigT")


RUN_FOLDER = "trainer.default_local_dir"
"""Name of the option for a run's folder."""


def run_hydra(
    name: str, schema: type[ConfigT], parse: Callable[[DictConfig], ConfigT], run: Callable[[ConfigT], None]
) -> None:
    """Compose ``configs/<name>.yaml`` with the command-line overrides, and call ``run`` on the output of ``parse``.

    With ``--multirun``, Hydra does this for every job, using the job's folder as the run's folder. A run folder on the
    command line becomes the sweep's folder. After several runs, the command for a joint report is printed.

    Raises ``SystemExit`` with a message if the overrides cannot be composed or the config is invalid.
    """

    folders: list[str] = []

    def task(tree: DictConfig) -> None:
        try:
            config = parse(tree)
        except ConfigError as error:
            raise SystemExit(error_lines(error)) from None
        trainer = getattr(config, "trainer", None)
        folders.extend([trainer.default_local_dir] if trainer is not None else [])
        run(config)

    if {"-m", "--multirun"} & set(sys.argv) and RUN_FOLDER in option_names(schema, ""):
        # The config itself cannot contain this value, because Hydra creates the folder only in sweeps. Insert it before
        # the first override, because Hydra expects adjacent overrides, and later overrides take precedence.
        overrides = (i for i, word in enumerate(sys.argv) if i and "=" in word and not word.startswith("-"))
        sys.argv.insert(next(overrides, len(sys.argv)), f"{RUN_FOLDER}=${{hydra:runtime.output_dir}}")
        sys.argv[1:] = map(_folder_of_sweep, sys.argv[1:])
    # Otherwise, Hydra prints its own message and exits.
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    try:
        check_group_values(sys.argv[1:])
        hydra.main(config_path=str(CONFIG_DIR), config_name=name, version_base="1.3")(task)()
        if len(folders) > 1:
            print(f"the {len(folders)} runs on one page: verl-report {os.path.commonpath(folders)}")
    except ConfigError as error:
        raise SystemExit(error_lines(error)) from None
    except HydraException as error:
        raise SystemExit(f"error: {explain(error, schema)}") from None
    except ModuleNotFoundError as error:
        if (error.name or "verl").partition(".")[0] in ("verl", "verl_pages", "vllm_patches"):
            raise
        fix = (
            "`pip install 'verl-rank[train,eval]'`, after torch and vLLM in the build that fits (docs/installation.md)"
        )
        raise SystemExit(f"error: {error.name} is not installed; {fix}") from None


def _folder_of_sweep(word: str) -> str:
    """Replace an override of the run's folder with one of the sweep's folder, which has a subfolder for each job.

    If all jobs shared one folder, the second job would resume the first. All other arguments, and folders that contain
    ``$`` or ``,``, are returned unchanged.
    """
    option, _, value = word.partition("=")
    return f"hydra.sweep.dir={value}" if option.lstrip("+") == RUN_FOLDER and not {*"$,"} & {*value} else word
