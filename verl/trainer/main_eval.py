"""Entry point for evaluation: ``python -m verl.trainer.main_eval [hydra overrides]``; see ``configs/`` for options."""

import sys

from verl.cli.eval_arguments import plain_arguments
from verl.cli.hydra_app import run_hydra
from verl.cli.values import FlagError
from verl.config.evaluation import EvaluationConfig, parse_evaluation_config
from verl.utils.process import loading


def run(config: EvaluationConfig) -> None:
    # Import lazily, so that --help, --cfg and config errors print immediately.
    with loading():
        from verl.evaluation.evaluate import run_evaluation
        from verl.run.exit_codes import run_to_exit_code

    run_to_exit_code(lambda: run_evaluation(config))


def main() -> None:
    try:
        sys.argv[1:] = plain_arguments(sys.argv[1:], EvaluationConfig)
    except FlagError as error:
        raise SystemExit(f"error: {error}") from None
    run_hydra("evaluation", EvaluationConfig, parse_evaluation_config, run)


if __name__ == "__main__":
    main()
