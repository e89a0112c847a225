"""One evaluation, from a checked config to tables, curves and a page.

What is wrong with one benchmark or one model costs that one alone: it is said in one line, the others are evaluated,
and the exit code tells.
"""

import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from verl.checkpoint.run_lock import locked
from verl.config.errors import ConfigError
from verl.config.evaluation import EvaluationConfig
from verl.evaluation.benchmarks import Problem
from verl.evaluation.generation import Work, generate_missing
from verl.evaluation.jobs import (
    Job,
    check_prompts_fit,
    engine_model,
    load_problems,
    load_target_tokenizer,
    make_jobs,
)
from verl.evaluation.progress import EvaluationDisplay
from verl.evaluation.report.publish import publish
from verl.evaluation.results import RunResult
from verl.evaluation.scoring import score
from verl.evaluation.targets import Target, select_targets
from verl.models.info import sequence_limit
from verl.rewards.pool import VerifierPool
from verl.rollout import engine_environment
from verl.rollout.requests import EngineModel
from verl.run.exit_codes import INTERRUPTED
from verl.single_controller import WorkerError, WorkerGroup
from verl.single_controller.cluster import ray_cluster, resolve_device

ENGINE_ERROR = "engine_error.log"

CPU_WORKERS = 2
"""Worker processes on a CPU with as many cores, where the config leaves their number open."""


@dataclass
class Failures:
    """What went wrong so far, said as it happens."""

    display: EvaluationDisplay
    lines: list[str] = field(default_factory=list)

    def add(self, error: Exception | str, what: str = "") -> None:
        """``what``: the model or benchmark that is not evaluated for it."""
        line = f"{what}: {error}" if what else str(error)
        if line not in self.lines:  # it may hold at every temperature
            self.lines.append(line)
            self.display.say(f"error: {line}")


def run_evaluation(config: EvaluationConfig) -> None:
    """Evaluate what ``config`` names.

    Raises:
        ConfigError: nothing can be evaluated.
        SystemExit: with 1, something could not be evaluated and the rest was; with 130, interrupted.
    """
    with EvaluationDisplay() as display:
        failures = Failures(display)
        try:
            _evaluate(config, display, failures)
        except KeyboardInterrupt:
            display.say("interrupted; samples are kept, and the same command goes on from there")
            sys.exit(INTERRUPTED)
        if failures.lines:
            count = len(failures.lines)
            display.say(f"{count} thing{'s' * (count > 1)} could not be evaluated; see the errors above")
            sys.exit(1)


def _evaluate(config: EvaluationConfig, display: EvaluationDisplay, failures: Failures) -> None:
    device_type = resolve_device(config.device)
    workers_per_node = count_workers(config, device_type)
    selection = select_targets(config)
    for note in selection.notes:
        display.say(f"note: {note}")
    for line in selection.problems:
        failures.add(line)
    benchmarks = _load_benchmarks(config, failures)
    tokenizers = _load_tokenizers(selection.targets, config, failures)
    if not benchmarks or not tokenizers:
        return
    default = Path(config.runs_dir, "evaluation", config.trainer.experiment_name, selection.name)
    folder = Path(config.trainer.default_local_dir or default).resolve()
    display.say(
        f"{', '.join(target.label for target in tokenizers)} on {', '.join(benchmarks)}: {config.n_sampling} samples "
        f"for each of {sum(map(len, benchmarks.values()))} problems, into {folder}"
    )
    with locked(folder):
        results: list[RunResult] = []
        with ExitStack() as stack:
            engines = stack.enter_context(Engines(config, device_type, workers_per_node))
            # Its processes start with the first sample that needs them.
            verifiers = VerifierPool(config.reward_score)
            stack.callback(verifiers.close)
            for place, (target, tokenizer) in enumerate(tokenizers.items(), start=1):
                try:
                    jobs = make_jobs(target, tokenizer, benchmarks, config, folder, device_type)
                except ConfigError as error:
                    failures.add(error, target.label)
                    continue
                title = f"{target.label} ({place}/{len(tokenizers)})" if len(tokenizers) > 1 else target.label
                results += _evaluate_target(title, jobs, config, engines, verifiers, display, failures)
        if results:
            publish(folder, results, config, display)


def count_workers(config: EvaluationConfig, device_type: str) -> int:
    """Workers per machine: as configured, or what this machine has in whole engines.

    Raises:
        ConfigError: an engine needs more GPUs than this machine has.
    """
    if config.trainer.n_gpus_per_node is not None:
        return config.trainer.n_gpus_per_node
    size = config.rollout.tensor_parallel_size
    if device_type == "cpu":
        return max(size, min(CPU_WORKERS, os.cpu_count() or 1) // size * size)
    available = torch.cuda.device_count()
    if available < size:
        raise ConfigError(
            f"rollout.tensor_parallel_size={size}: this machine has {available} GPUs; lower it, or for engines that "
            "span machines set trainer.n_gpus_per_node and trainer.nnodes"
        )
    return available // size * size


def _load_benchmarks(config: EvaluationConfig, failures: Failures) -> dict[str, list[Problem]]:
    """Name -> problems of those that can be loaded."""
    loaded = {}
    for name in config.benchmarks:
        try:
            loaded[name] = load_problems(name, config)
        except ConfigError as error:
            failures.add(error)
    return loaded


def _load_tokenizers(
    targets: Sequence[Target], config: EvaluationConfig, failures: Failures
) -> dict[Target, PreTrainedTokenizerBase]:
    """The targets that have a tokenizer and a template that go together; so that what has not is said at the start."""
    loaded = {}
    for target in targets:
        try:
            loaded[target] = load_target_tokenizer(target, config.rollout.trust_remote_code)
        except ConfigError as error:
            failures.add(error, target.label)
    return loaded


class Engines:
    """Worker groups for one model after another, on a Ray cluster that is started for the first; a context manager."""

    def __init__(self, config: EvaluationConfig, device_type: str, workers_per_node: int) -> None:
        self.config = config
        self.device_type = device_type
        self.workers_per_node = workers_per_node
        self._stack = ExitStack()
        self._started = False

    def __enter__(self) -> "Engines":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def world_size(self) -> int:
        return self.config.trainer.nnodes * self.workers_per_node

    @property
    def num_engines(self) -> int:
        return self.world_size // self.config.rollout.tensor_parallel_size

    def start(self, model: EngineModel) -> WorkerGroup:
        """Workers that hold ``model``; to be closed by the caller. Raises ``WorkerError`` if one cannot load it."""
        if not self._started:
            self._stack.enter_context(ray_cluster(self.world_size, self.device_type))
            self._started = True
        calculator = self.config.calculator
        try:
            return WorkerGroup(
                "verl.workers.evaluation:EvaluationWorker",
                self.config.rollout,
                (model, calculator if calculator.enable else None),
                self.config.trainer.nnodes,
                self.workers_per_node,
                self.device_type,
                engine_environment(self.device_type),
            )
        except WorkerError:
            # The group's other workers live on with their share of the machine; they go with the cluster.
            self._stack.close()
            self._started = False
            raise


def _evaluate_target(
    title: str,
    jobs: Sequence[Job],
    config: EvaluationConfig,
    engines: Engines,
    verifiers: VerifierPool,
    display: EvaluationDisplay,
    failures: Failures,
) -> list[RunResult]:
    """Generate what one model lacks, and score it; the results of the jobs that succeeded."""
    results = []
    with ExitStack() as stack:
        works = _open_works(jobs, config, stack, failures)
        try:
            _generate(title, works, config, engines, display)
        except WorkerError as error:
            # <folder>/<run>/step_N, above benchmark and temperature.
            failures.add(_in_one_line(error, jobs[0].folder.parents[1] / ENGINE_ERROR), jobs[0].target.label)
            works = [work for work in works if not work.missing(config.n_sampling)]
        for work in works:
            display.phase(f"scoring {work.job.benchmark}")
            try:
                results.append(score(work, config.n_sampling, verifiers))
            except ConfigError as error:
                failures.add(error, work.job.target.label)
        display.finish()
    return results


def _in_one_line(error: WorkerError, log: Path) -> str:
    """What a worker said, whose traceback goes to the file ``log``."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    if len(lines) == 1:
        return lines[0]
    log.write_text(f"{error}\n")
    return f"{lines[0]} {lines[-1]}; its traceback is in {log}"


def _open_works(jobs: Sequence[Job], config: EvaluationConfig, stack: ExitStack, failures: Failures) -> list[Work]:
    """The jobs whose prompts the model can take and whose folders are theirs."""
    works = []
    try:
        limit = sequence_limit(jobs[0].target.path, config.rollout.trust_remote_code)
    except ConfigError as error:
        failures.add(error, jobs[0].target.label)
        return []
    for job in jobs:
        try:
            check_prompts_fit(job.prompts, limit)
            works.append(Work(job, stack.enter_context(job.open_store())))
        except ConfigError as error:
            failures.add(error, job.label)
    return works


def _generate(
    title: str, works: Sequence[Work], config: EvaluationConfig, engines: Engines, display: EvaluationDisplay
) -> None:
    """Generate what is missing, if anything is."""
    missing = [(work, keys) for work in works if (keys := work.missing(config.n_sampling))]
    if not missing:
        return
    lacking = [work for work, _ in missing]
    num_samples = sum(len(keys) for _, keys in missing)
    total = sum(config.n_sampling * len(work.job.problems) for work in works)
    if num_samples < total:
        display.say(f"{title}: {total - num_samples} of {total} samples are there already")
    display.start(title, sum(len({problem for problem, _ in keys}) for _, keys in missing), num_samples)
    job = lacking[0].job
    limit = sequence_limit(job.target.path, config.rollout.trust_remote_code)
    prompts = [ids for work in lacking for ids in work.job.prompts]
    workers = engines.start(engine_model(job, prompts, config, limit))
    try:
        display.running()
        generate_missing(
            lacking,
            config.n_sampling,
            config.seed,
            workers,
            engines.num_engines,
            config.rollout.max_num_seqs,
            display,
        )
    finally:
        workers.close()
