"""Entry point of the paper's analysis: ``python -m verl.trainer.main_analysis [hydra overrides]``; docs/analysis.md."""

import sys
from importlib.util import find_spec

import hydra
from omegaconf import DictConfig

from verl.cli.eval_arguments import plain_arguments
from verl.cli.hydra_app import run_hydra
from verl.cli.values import FlagError
from verl.config.analysis import AnalysisConfig, parse_analysis_config
from verl.config.errors import ConfigError
from verl.config.load import CONFIG_DIR
from verl.utils.process import loading

PACKAGES = {
    "rouge_score": "rouge-score",
    "rapidfuzz": "rapidfuzz",
    "scipy": "scipy",
    "pandas": "pandas",
    "openpyxl": "openpyxl",
}
"""What the extra ``analysis`` installs: module -> package."""


def check_packages() -> None:
    """Raise ``ConfigError`` naming the packages that are missing."""
    missing = [package for module, package in PACKAGES.items() if find_spec(module) is None]
    if missing:
        install = f"install them with `pip install {' '.join(missing)}`, or the project with its extra `analysis`"
        raise ConfigError(f"the analysis needs {', '.join(missing)}; {install}")


@hydra.main(config_path=str(CONFIG_DIR), config_name="analysis", version_base="1.3")
def run(tree: DictConfig) -> None:
    """Check the config, then analyse."""
    try:
        config = parse_analysis_config(tree)
        check_packages()
    except ConfigError as error:
        raise SystemExit(f"error: {error}") from None

    # Late, so that --help, --cfg and a wrong config answer at once.
    with loading():
        from verl.analysis.analyse import run_analysis
        from verl.run.exit_codes import run_to_exit_code

    run_to_exit_code(lambda: run_analysis(config))


def main() -> None:
    """The command line."""
    try:
        sys.argv[1:] = plain_arguments(sys.argv[1:], AnalysisConfig)
    except FlagError as error:
        raise SystemExit(f"error: {error}") from None
    run_hydra(run, AnalysisConfig)


if __name__ == "__main__":
    main()
