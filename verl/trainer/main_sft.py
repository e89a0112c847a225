"""Entry point for supervised fine-tuning: ``python -m verl.trainer.main_sft [hydra overrides]``."""

from verl.cli.hydra_app import run_hydra
from verl.config.sft import SFTConfig
from verl.run.parent import run_in_child
from verl.run.run_config import parse_run_config
from verl.utils.process import loading


def run(config: SFTConfig) -> None:
    """Run the training job in a child process."""

    def work() -> None:
        print("importing libraries, reading data and checking options", flush=True)
        # Import lazily, so that --help, --cfg and config errors print immediately.
        with loading():
            from verl.run.exit_codes import run_to_exit_code
            from verl.trainer.sft_trainer import run_sft

        run_to_exit_code(lambda: run_sft(config), requeue=True)

    run_in_child(work, config.trainer)


def main() -> None:
    run_hydra("sft", SFTConfig, lambda tree: parse_run_config(SFTConfig, tree), run)


if __name__ == "__main__":
    main()
