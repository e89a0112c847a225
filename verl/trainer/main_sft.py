"""Entry point of supervised fine-tuning: ``python -m verl.trainer.main_sft [hydra overrides]``."""

import hydra
from omegaconf import DictConfig

from verl.checkpoint.run_start import parse_run_config
from verl.cli.hydra_app import run_hydra
from verl.config.errors import ConfigError
from verl.config.load import CONFIG_DIR
from verl.config.sft import SFTConfig
from verl.utils.process import loading


@hydra.main(config_path=str(CONFIG_DIR), config_name="sft", version_base="1.3")
def run(tree: DictConfig) -> None:
    """Check the config, then train."""
    try:
        config = parse_run_config(SFTConfig, tree)
    except ConfigError as error:
        raise SystemExit(f"error: {error}") from None

    # Late, so that --help, --cfg and a wrong config answer at once.
    with loading():
        from verl.run.exit_codes import run_to_exit_code
        from verl.trainer.sft_trainer import run_sft

    run_to_exit_code(lambda: run_sft(config), requeue=True)


def main() -> None:
    """The command line."""
    run_hydra(run, SFTConfig)


if __name__ == "__main__":
    main()
