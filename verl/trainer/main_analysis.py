"""Entry point for the paper's analysis: ``python -m verl.trainer.main_analysis [overrides]``; see docs/analysis.md."""

import sys
from importlib.util import find_spec

from omegaconf import DictConfig

from verl.cli.eval_arguments import plain_arguments
from verl.cli.hydra_app import run_hydra
from verl.cli.values import FlagError
from verl.config.analysis import AnalysisConfig, parse_analysis_config
from verl.config.errors import ConfigError
from verl.utils.process import loading

PACKAGES = {name.replace("-", "_"): name for name in ("rouge-score", "rapidfuzz", "scipy", "matplotlib", "openpyxl")}
"""Maps each module to the package that provides it. The pip extra ``analysis`` installs all of these packages."""


def parse(tree: DictConfig) -> AnalysisConfig:
    """Return the validated config, or raise ``ConfigError`` if it is invalid or a required package is missing."""
    config = parse_analysis_config(tree)
    missing = [package for module, package in PACKAGES.items() if find_spec(module) is None]
    if missing:
        install = f"install them with `pip install {' '.join(missing)}`, or the project with its extra `analysis`"
        raise ConfigError(f"the analysis needs {', '.join(missing)}; {install}")
    return config


def run(config: AnalysisConfig) -> None:
    # Import lazily, so that --help, --cfg and config errors print immediately.
    with loading():
        from verl.analysis.analyse import run_analysis
        from verl.run.exit_codes import run_to_exit_code

    run_to_exit_code(lambda: run_analysis(config))


def main() -> None:
    try:
        sys.argv[1:] = plain_arguments(sys.argv[1:], AnalysisConfig)
    except FlagError as error:
        raise SystemExit(f"error: {error}") from None
    run_hydra("analysis", AnalysisConfig, parse, run)


if __name__ == "__main__":
    main()
