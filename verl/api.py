"""Provides the Python interface: ``verl.train``, ``verl.evaluate``, ``verl.score`` and their results.

Each run is executed in a separate process, and its results are read from the run's folder. An interrupt or error ends
the run but not the caller's process, which may be a notebook kernel.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from verl.checkpoint.folders import checkpoints
from verl.cli.eval_arguments import plain_arguments
from verl.cli.translate import translate
from verl.cli.values import FlagError, quoted
from verl.config.errors import ConfigError
from verl.config.evaluation import EvaluationConfig, parse_evaluation_config
from verl.config.load import compose_config
from verl.config.ppo import PPOConfig
from verl.rewards import check_ground_truth, compute_score
from verl.run.run_config import parse_run_config


class RunError(RuntimeError):
    """Raised when a run fails. The message contains the errors that the run printed.

    ``code`` is the run's exit code: 1 if it failed, 75 if it should be restarted, 128 + N if signal N killed it.
    """

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Run:
    """Folder of a training run, which may be unfinished. Results are read from the folder's files on each access."""

    folder: Path

    @property
    def metrics(self) -> pd.DataFrame:
        """Logged metrics, one row per step."""
        lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        return pd.DataFrame.from_records([json.loads(line) for line in lines], index="step")

    @property
    def samples(self) -> pd.DataFrame:
        """Saved responses with verdicts and metrics (docs/samples.md)."""
        return pd.read_parquet(self.folder / "samples")

    @property
    def summary(self) -> dict[str, Any]:
        """Final metrics, versions, seed and git revision."""
        return dict(json.loads((self.folder / "summary.json").read_text()))

    @property
    def model(self) -> Path | None:
        """Newest model folder in ``transformers`` format, or None if no checkpoint contains such a folder."""
        models = [folder / "actor" / "huggingface" for folder in checkpoints(self.folder).values()]
        return next((model for model in reversed(models) if model.is_dir()), None)

    @property
    def page(self) -> Path:
        """Path of the run's HTML report."""
        return self.folder / "report.html"


@dataclass(frozen=True)
class Evaluation:
    """Output folder of an evaluation. Results are read from the folder's files (docs/evaluation.md) on each access."""

    folder: Path

    @property
    def metrics(self) -> pd.DataFrame:
        """Results with one row per model and benchmark: pass@k with intervals, lengths, and rank metrics."""
        return pd.read_csv(self.folder / "results.csv")

    @property
    def summary(self) -> dict[str, Any]:
        """Results by model and benchmark, and any failures."""
        return dict(json.loads((self.folder / "summary.json").read_text()))

    @property
    def page(self) -> Path:
        """Path of the HTML report."""
        return self.folder / "index.html"


def score(
    data_source: str, response: str, truth: Any, extra_info: Mapping[str, Any] | None = None, mode: str = "mix"
) -> dict[str, Any]:
    """Return the verdict on a response and its score, computed in this process without a time limit.

    Raises ``ConfigError`` if the data source or mode is unknown, or the verifier cannot use this ground truth.

    Args:
        data_source: Name that selects the verifier (docs/rewards.md).
        truth: Ground truth, as in ``reward_model.ground_truth`` of a data file.
        extra_info: Additional information for verifiers that read it, as in a data file.
        mode: Score mode; see ``reward_score.mode``.
    """
    check_ground_truth(data_source, truth, extra_info=extra_info)
    return compute_score(data_source, response, truth, extra_info, mode)


def train(overrides: Sequence[str] = ()) -> Run:
    """Train as with ``bash train.sh OVERRIDE...``, and return the run.

    Raises:
        ConfigError: If an override is invalid or conflicts with others.
        RunError: If the run fails.
        KeyboardInterrupt: If the run is interrupted. After it has ended, a call with the same folder resumes it.
    """
    words = _translated(overrides, translate)
    folder = parse_run_config(PPOConfig, compose_config(PPOConfig, "ppo_trainer", words)).trainer.default_local_dir
    _call("verl.trainer.main_ppo", [*words, f"trainer.default_local_dir={quoted(folder)}"])
    return Run(Path(folder))


def evaluate(overrides: Sequence[str] = ()) -> Evaluation:
    """Evaluate as with ``bash eval.sh OVERRIDE...``, and return the evaluation.

    The default, ``evaluation=embedded``, evaluates the newest run of the embedded task before and after training.
    Raises the same errors as :func:`train`. Repeating the call resumes an interrupted evaluation.
    """
    words = _translated(overrides, lambda words: plain_arguments(words, EvaluationConfig)) or ["evaluation=embedded"]
    config = parse_evaluation_config(compose_config(EvaluationConfig, "evaluation", words))
    _call("verl.trainer.main_eval", words)
    # By default, the folder is named after the evaluated models.
    parent = Path(config.runs_dir, "evaluation", config.trainer.experiment_name).resolve()
    pages = [Path(config.trainer.default_local_dir, "index.html")] if config.trainer.default_local_dir else []
    return Evaluation(max(pages or parent.glob("*/index.html"), key=lambda page: page.stat().st_mtime).parent)


def _translated(words: Sequence[str], translation: Callable[[list[str]], list[str]]) -> list[str]:
    """Return Hydra overrides, or raise ``ConfigError`` if ``words`` is a string or contains one of Hydra's flags."""
    if isinstance(words, str):
        raise ConfigError(f"overrides={words!r:.200}: must be a list of strings, such as ['rollout.n=8']")
    try:
        overrides = translation(list(words))
    except FlagError as error:
        raise ConfigError(str(error)) from None
    if flags := [word for word in overrides if word.startswith("-")]:
        raise ConfigError(f"overrides={flags[0]!r}: is a flag of the command line; name options, as in 'rollout.n=8'")
    return overrides


def _call(module: str, words: Sequence[str]) -> None:
    """Run an entry point in a separate process, and print its output.

    The first interrupt stops the run as Ctrl-C would. A second interrupt kills the run.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", module, *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        env=os.environ | {"PYTHONUNBUFFERED": "1", "MPLBACKEND": "agg"},  # a notebook's backend needs its kernel
    )
    assert process.stdout is not None
    lines = []
    try:
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line.strip())
        process.wait()
    except KeyboardInterrupt:
        process.send_signal(signal.SIGINT)
        print(process.communicate()[0], end="")
        raise
    finally:
        process.kill()  # after a second interrupt
    if process.returncode:
        errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        raise RunError("\n".join(errors or [line for line in lines if line][-1:]), process.returncode)
