"""Training, evaluation and scores from Python: ``verl.train``, ``verl.evaluate``, ``verl.score`` and what they return.

A run has a process of its own, that of its entry point: an interrupt or an error ends it and leaves the caller's, a
notebook's kernel for example, as it was.
"""

import codecs
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

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

PAGE_LINE = "page: "
"""What an evaluation prints before the path of its page, which is in its folder."""

KEPT_CHARACTERS = 20_000
"""The end of a run's output, in which an error is looked for."""

LISTEN_S = 0.2
"""Seconds between two looks at whether a run that prints nothing has ended."""


class RunError(RuntimeError):
    """A run that failed; the message is its last lines.

    Args:
        code: its exit code: 1 failed, 75 to be started again, 128 + N ended by signal N.
    """

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Run:
    """The folder of a training run, finished or not. Everything is read when it is asked for."""

    folder: Path

    @property
    def metrics(self) -> pd.DataFrame:
        """Every logged number: a row per step, a column per metric."""
        lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        return pd.DataFrame.from_records([json.loads(line) for line in lines], index="step")

    @property
    def samples(self) -> pd.DataFrame:
        """The responses that were kept, with verdicts and metrics (docs/samples.md)."""
        return pd.read_parquet(self.folder / "samples")

    @property
    def summary(self) -> dict[str, Any]:
        """Final figures, versions, seed and git revision."""
        return _read_object(self.folder / "summary.json")

    @property
    def model(self) -> Path | None:
        """The newest checkpoint's model, as ``transformers`` loads it; None where no checkpoint has one."""
        models = [folder / "actor" / "huggingface" for folder in checkpoints(self.folder).values()]
        return next((model for model in reversed(models) if model.is_dir()), None)

    @property
    def page(self) -> Path:
        """The page of the run, for a browser."""
        return self.folder / "report.html"


@dataclass(frozen=True)
class Evaluation:
    """The folder of an evaluation. Everything is read when it is asked for."""

    folder: Path

    @property
    def metrics(self) -> pd.DataFrame:
        """A row per model and benchmark: pass@k with its interval, lengths, rank metrics (docs/evaluation.md)."""
        return pd.read_csv(self.folder / "results.csv")

    @property
    def samples(self) -> pd.DataFrame:
        """All responses, each with its model (``run``, ``step``), benchmark and temperature."""
        tables = []
        for file in sorted(self.folder.rglob("samples.parquet")):
            run, step, benchmark, temperature = map(unquote, file.relative_to(self.folder).parts[:4])
            place = {"run": run, "step": int(step.removeprefix("step_")), "benchmark": benchmark}
            tables.append(pd.read_parquet(file).assign(**place, temperature=float(temperature.removeprefix("T"))))
        return pd.concat(tables, ignore_index=True)

    @property
    def summary(self) -> dict[str, Any]:
        """Figures by model and benchmark, and what failed."""
        return _read_object(self.folder / "summary.json")

    @property
    def page(self) -> Path:
        """The page of the results, for a browser."""
        return self.folder / "index.html"


def score(
    data_source: str,
    response: str,
    truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    mode: str = "mix",
) -> dict[str, Any]:
    """The verdict on one response and its score, in this process and without a limit on time.

    Args:
        data_source: which verifier scores it (docs/rewards.md).
        truth: the ground truth, as in ``reward_model.ground_truth`` of a data file.
        extra_info: as in a data file, where a verifier reads it.
        mode: as ``reward_score.mode``, whose default this is.

    Raises:
        ConfigError: an unknown data source or mode, or a truth that the verifier cannot compare with.
    """
    check_ground_truth(data_source, truth, extra_info=extra_info)
    return compute_score(data_source, response, truth, extra_info, mode)


def train(overrides: Sequence[str] = ()) -> Run:
    """Train as ``bash train.sh OVERRIDE...`` does and return the run's folder. The run prints what it prints there.

    Raises:
        ConfigError: an override is wrong, or does not fit the others.
        RunError: the run failed.
        KeyboardInterrupt: it was interrupted, and has ended; the same call with its folder resumes it.
    """
    words = _overrides(overrides, translate)
    config = parse_run_config(PPOConfig, compose_config(PPOConfig, "ppo_trainer", words))
    folder = config.trainer.default_local_dir
    _call("verl.trainer.main_ppo", [*words, f"trainer.default_local_dir={quoted(folder)}"])
    return Run(Path(folder))


def evaluate(overrides: Sequence[str] = ()) -> Evaluation:
    """Evaluate as ``bash eval.sh OVERRIDE...`` does and return the folder of the results.

    Without overrides that is ``evaluation=embedded``: the newest run of the embedded task, before and after training.

    Raises:
        ConfigError: an override is wrong, or does not fit the others.
        RunError: one of the evaluations failed.
        KeyboardInterrupt: it was interrupted, and has ended; the same call resumes it.
    """
    words = _overrides(overrides, lambda words: plain_arguments(words, EvaluationConfig)) or ["evaluation=embedded"]
    parse_evaluation_config(compose_config(EvaluationConfig, "evaluation", words))
    output = _call("verl.trainer.main_eval", words)
    pages = [line.removeprefix(PAGE_LINE) for line in output.splitlines() if line.startswith(PAGE_LINE)]
    return Evaluation(Path(pages[-1]).parent)


def _overrides(words: Sequence[str], translated: Callable[[list[str]], list[str]]) -> list[str]:
    """The overrides as Hydra reads them. Raises ``ConfigError`` for a single string, and for Hydra's own flags."""
    if isinstance(words, str):
        raise ConfigError(f"overrides={words!r:.200}: must be a list of strings, such as ['rollout.n=8']")
    try:
        overrides = translated(list(words))
    except FlagError as error:
        raise ConfigError(str(error)) from None
    if flags := [word for word in overrides if word.startswith("-")]:
        raise ConfigError(f"overrides={flags[0]!r}: is a flag of the command line; name options, as in 'rollout.n=8'")
    return overrides


def _call(module: str, words: Sequence[str]) -> str:
    """Run an entry point in a process of its own, print what it prints, and return the end of that.

    A first interrupt is passed on, so that the run can end as it does on Ctrl-C; a second one kills it.
    """
    # A notebook's backend of matplotlib draws in the notebook alone.
    environment = {name: value for name, value in os.environ.items() if name != "MPLBACKEND"}
    environment["PYTHONUNBUFFERED"] = "1"
    process = subprocess.Popen(
        [sys.executable, "-m", module, *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
        start_new_session=True,  # Ctrl-C would reach it twice, from the terminal and from here
    )
    assert process.stdout is not None
    output = _Relay(process, process.stdout.fileno())
    with process:
        try:
            output.relay()
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)
            output.relay()
            raise
        finally:
            if process.poll() is None:
                process.kill()
    if process.returncode:
        raise RunError(_failure(output.end), process.returncode)
    return output.end


class _Relay:
    """Prints what a process prints until it has ended, though others that it started may hold its output open."""

    def __init__(self, process: subprocess.Popen[bytes], descriptor: int) -> None:
        self._process, self._descriptor = process, descriptor
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.end = ""

    def relay(self) -> None:
        """Return when the process has ended and all that it printed is printed."""
        while True:
            ended = self._process.poll() is not None  # before looking for output: its last words come first
            if select.select([self._descriptor], [], [], 0 if ended else LISTEN_S)[0]:
                data = os.read(self._descriptor, 1 << 16)
                text = self._decoder.decode(data)
                print(text, end="", flush=True)
                self.end = (self.end + text)[-KEPT_CHARACTERS:]
                if data:
                    continue
                self._process.wait()  # it has closed its output
                return
            if ended:
                return


def _failure(output: str) -> str:
    """The errors that the end of a run's output tells of; its last line if it tells of none."""
    lines = [line for line in output.splitlines() if line.strip()]
    told = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return "\n".join(told or lines[-1:]) or "the run printed nothing"


def _read_object(path: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(path.read_text())
    return values
