"""Entry point of training: ``python -m verl.trainer.main_ppo [hydra overrides]``; options in ``configs/``."""

import hydra
from omegaconf import DictConfig

from verl.cli.hydra_app import run_hydra
from verl.config.errors import ConfigError
from verl.config.load import CONFIG_DIR, parse_run_config
from verl.config.ppo import PPOConfig


@hydra.main(config_path=str(CONFIG_DIR), config_name="ppo_trainer", version_base="1.3")
def run(tree: DictConfig) -> None:
    """Check the config, then train."""
    try:
        config = parse_run_config(PPOConfig, tree)
    except ConfigError as error:
        raise SystemExit(f"error: {error}") from None

    # Late, so that --help, --cfg and a wrong config answer at once.
    from verl.run.exit_codes import run_to_exit_code
    from verl.trainer.ppo.run import run_ppo

    run_to_exit_code(lambda: run_ppo(config))


def main() -> None:
    """The command line."""
    run_hydra(run, PPOConfig)


if __name__ == "__main__":
    main()
