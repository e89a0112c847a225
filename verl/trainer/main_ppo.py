"""Entry point for training: ``python -m verl.trainer.main_ppo ARGUMENT...``, called by ``train.sh``.

Arguments can be Hydra overrides of the options in ``configs/``, Hydra flags, options from the paper's release, or veRL
options.
"""

import os
import sys
from collections.abc import Sequence
from functools import partial

from verl.cli.hydra_app import run_hydra
from verl.cli.release_analysis import analysis_arguments
from verl.cli.translate import overrides_of, read_line
from verl.cli.values import FlagError
from verl.config.errors import ConfigError, error_lines
from verl.config.ppo import PPOConfig
from verl.config.unused import unused_options
from verl.run.parent import run_in_child
from verl.run.run_config import parse_run_config
from verl.utils.process import loading


def run(config: PPOConfig, overrides: Sequence[str]) -> None:
    """Print a warning for each group of ``overrides`` that has no effect, then train."""

    def work() -> None:
        for line in unused_options(overrides, config):
            print(f"warning: {line}", flush=True)
        print("importing libraries, reading data and checking options", flush=True)
        # Import lazily, so that --help, --cfg and config errors print immediately.
        with loading():
            from verl.run.exit_codes import run_to_exit_code
            from verl.trainer.ppo.run import run_ppo

        run_to_exit_code(lambda: run_ppo(config), requeue=True)

    run_in_child(work, config.trainer)


def main() -> None:
    try:
        line = read_line(sys.argv[1:])
        analysis = analysis_arguments(line)
        if analysis is not None:
            os.execv(sys.executable, [sys.executable, "-m", "verl.trainer.main_analysis", *analysis])
        sys.argv[1:] = overrides_of(line)
    except FlagError as error:
        raise SystemExit(f"error: {error}") from None
    except ConfigError as error:
        raise SystemExit(error_lines(error)) from None
    run_hydra(
        "ppo_trainer", PPOConfig, lambda tree: parse_run_config(PPOConfig, tree), partial(run, overrides=sys.argv[1:])
    )


if __name__ == "__main__":
    main()
