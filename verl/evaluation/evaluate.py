"""One evaluation, from a checked config to tables, curves and a page.

If one benchmark or model fails, a line says so, the others are evaluated, and the exit code is 1.
"""

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from verl.checkpoint.attempts import run_lock
from verl.checkpoint.run_start import require_folder
from verl.config.analysis import AnalysisConfig
from verl.config.errors import ConfigError
from verl.config.evaluation import EvaluationConfig
from verl.evaluation.benchmarks import Problem
from verl.evaluation.generation import generate_missing
from verl.evaluation.progress import EvaluationDisplay
from verl.evaluation.report.publish import publish
from verl.evaluation.results import TaskResult
from verl.evaluation.scoring import score_samples
from verl.evaluation.store import SampleStore
from verl.evaluation.targets import Target, select_targets
from verl.evaluation.tasks import (
    EvaluationTask,
    engine_model,
    load_problems,
    load_target_tokenizer,
    make_tasks,
    without_long_prompts,
)
from verl.models.info import ModelInfo
from verl.rank.own_metrics import own_measures
from verl.rewards.pool import VerifierPool
from verl.rollout import engine_environment
from verl.rollout.requests import EngineModel
from verl.run.exit_codes import INTERRUPTED
from verl.run.session import RaySession
from verl.run.sinks import check_trackers
from verl.single_controller.cluster import gpus_per_machine, resolve_device
from verl.single_controller.exchange import Exchange
from verl.single_controller.failures import WorkerError
from verl.single_controller.worker_group import WorkerGroup

ENGINE_ERROR = "engine_error.log"

CPU_WORKERS = 2
"""Worker processes on a CPU that has as many cores, if the config does not set their number."""


@dataclass
class Failures:
    """The errors so far; each is printed as it happens."""

    display: EvaluationDisplay
    lines: list[str] = field(default_factory=list)
    missing_benchmarks: list[str] = field(default_factory=list)
    """Names of those that could not be loaded."""

    @contextmanager
    def recorded(self, what: str = "") -> Iterator[None]:
        """Add a ``ConfigError`` that is raised within, and go on after it; ``what`` as in :meth:`add`."""
        try:
            yield
        except ConfigError as error:
            self.add(error, what)

    def add(self, error: Exception | str, what: str = "") -> None:
        """Print and keep an error; ``what``: the model or benchmark that is not evaluated because of it."""
        line = f"{what}: {error}" if what else str(error)
        if line not in self.lines:  # the same error may occur at every temperature
            self.lines.append(line)
            self.display.say(f"error: {line}")

    def summarise(self) -> None:
        """Say how many there were, and in one line which benchmarks are missing from the results."""
        count = len(self.lines)
        self.display.say(f"{count} evaluation{'s' * (count > 1)} failed; see the errors above")
        if self.missing_benchmarks:
            names = ", ".join(self.missing_benchmarks)
            self.display.say(f"without {names}; docs/evaluation.md says where benchmarks come from")


def run_evaluation(config: EvaluationConfig) -> None:
    """Evaluate the models on the benchmarks that ``config`` names.

    Raises:
        ConfigError: the config does not fit the machine, or another run is using the folder.
        SystemExit: with 1 if some evaluations failed; with 130 after an interrupt.
    """
    own_measures(config.calculator.own_metrics)  # checked before an engine starts
    run_to_end(lambda display, failures: _evaluate(config, display, failures), "samples")


def run_to_end(job: Callable[[EvaluationDisplay, Failures], None], kept: str) -> None:
    """Run ``job``; an interrupt says that what it ``kept`` stays.

    Raises:
        SystemExit: with 1 if some evaluations failed; with 130 after an interrupt.
    """
    with EvaluationDisplay() as display:
        failures = Failures(display)
        try:
            job(display, failures)
        except KeyboardInterrupt:
            display.say(f"interrupted; {kept} are kept, and the same command resumes from them")
            sys.exit(INTERRUPTED)
        if failures.lines:
            failures.summarise()
            sys.exit(1)


@dataclass(frozen=True)
class Job:
    """An evaluation or an analysis, checked and loaded, before its engines start."""

    folder: Path
    """Folder of the results."""
    session: RaySession
    benchmarks: Mapping[str, list[Problem]]
    tokenizers: Mapping[Target, PreTrainedTokenizerBase]
    """Tokenizer of each target."""


def prepare(
    config: EvaluationConfig | AnalysisConfig,
    kind: str,
    display: EvaluationDisplay,
    failures: Failures,
    more_benchmarks: Mapping[str, list[Problem]] | None = None,
) -> Job | None:
    """Load everything that can be wrong before engines start; None if nothing is left to do.

    Args:
        kind: ``evaluation`` or ``analysis``, the folder below ``runs_dir``.
        more_benchmarks: beside those that the config names.
    """
    trainer = config.trainer
    check_trackers(trainer.logger)
    machines = (trainer.nnodes, trainer.n_gpus_per_node or 1, trainer.machines_timeout_s)
    device_type = resolve_device(config.device, *machines)
    workers_per_node = count_workers(config, device_type)
    selection = select_targets(config)
    for note in selection.notes:
        display.say(f"note: {note}")
    for line in selection.errors:
        failures.add(line)
    benchmarks = load_benchmarks(config, failures) | dict(more_benchmarks or {})
    tokenizers = load_tokenizers(selection.targets, config, failures)
    if not benchmarks or not tokenizers:
        return None
    default = Path(config.runs_dir, kind, trainer.experiment_name, selection.folder_name)
    folder = Path(trainer.default_local_dir or default).resolve()
    require_folder("trainer.default_local_dir", str(folder))
    display.say(
        f"{', '.join(target.label for target in tokenizers)} on {', '.join(benchmarks)}: {config.n_sampling} samples "
        f"for each of {sum(map(len, benchmarks.values()))} problems, into {folder}"
    )
    session = RaySession(trainer.nnodes, workers_per_node, device_type, trainer, folder)
    return Job(folder, session, benchmarks, tokenizers)


def _evaluate(config: EvaluationConfig, display: EvaluationDisplay, failures: Failures) -> None:
    job = prepare(config, "evaluation", display, failures)
    if job is None:
        return
    session, count = job.session, len(job.tokenizers)
    with run_lock(job.folder):
        results: list[TaskResult] = []
        # The verifiers' processes start with the first sample to score.
        with session, closing(VerifierPool(config.reward_score, session.busy_cores)) as verifiers:
            for place, (target, tokenizer) in enumerate(job.tokenizers.items(), start=1):
                with failures.recorded(target.label):
                    tasks = make_tasks(
                        target, tokenizer, job.benchmarks, config, job.folder, session.device_type, failures.add
                    )
                    title = f"{target.label} ({place}/{count})" if count > 1 else target.label
                    results += _evaluate_target(title, tasks, config, session, verifiers, display, failures)
        if results:
            publish(job.folder, results, config, display, failures.lines)


def count_workers(config: EvaluationConfig | AnalysisConfig, device_type: str) -> int:
    """Workers per machine: as configured, or as many as this machine has GPUs or cores for, in whole engines.

    Raises:
        ConfigError: an engine needs more GPUs than this machine has.
    """
    if config.trainer.n_gpus_per_node is not None:
        return config.trainer.n_gpus_per_node
    size = config.rollout.tensor_parallel_size
    if device_type == "cpu":
        return max(size, min(CPU_WORKERS, os.cpu_count() or 1) // size * size)
    available = gpus_per_machine()
    if available < size:
        raise ConfigError(
            f"rollout.tensor_parallel_size={size}: this machine has {available} GPUs; lower it, or for engines that "
            "span machines set trainer.n_gpus_per_node and trainer.nnodes"
        )
    return available // size * size


def load_benchmarks(config: EvaluationConfig | AnalysisConfig, failures: Failures) -> dict[str, list[Problem]]:
    """Name -> problems of the benchmarks that can be loaded."""
    loaded = {}
    for name in config.benchmarks:
        with failures.recorded():
            loaded[name] = load_problems(name, config)
    failures.missing_benchmarks += [name for name in config.benchmarks if name not in loaded]
    return loaded


def load_tokenizers(
    targets: Sequence[Target], config: EvaluationConfig | AnalysisConfig, failures: Failures
) -> dict[Target, PreTrainedTokenizerBase]:
    """The targets whose tokenizer can be loaded and fits their template; errors of others are reported at the start."""
    loaded = {}
    for target in targets:
        with failures.recorded(target.label):
            loaded[target] = load_target_tokenizer(target, config.rollout.trust_remote_code)
    return loaded


def start_engines(session: RaySession, model: EngineModel, config: EvaluationConfig) -> WorkerGroup:
    """Workers that hold ``model``, to be closed by the caller. Raises ``WorkerError`` if one cannot load it."""
    calculator = config.calculator if config.calculator.enable else None
    worker, environment = "verl.workers.evaluation:EvaluationWorker", engine_environment(session.device_type)
    return session.start_workers(worker, config.rollout, (model, calculator), environment, [model.path])


def _evaluate_target(
    title: str,
    tasks: Sequence[EvaluationTask],
    config: EvaluationConfig,
    session: RaySession,
    verifiers: VerifierPool,
    display: EvaluationDisplay,
    failures: Failures,
) -> list[TaskResult]:
    """Generate the missing samples of one model and score all; the results of the tasks that succeeded."""
    results = []
    with ExitStack() as stack:
        stores = open_stores(tasks, config, stack, failures) if tasks else {}
        try:
            generate_target(title, stores, config, session, display)
        except (WorkerError, ConfigError) as error:
            # <folder>/<run>/step_N, above benchmark and temperature.
            failures.add(in_one_line(error, tasks[0].folder.parents[1] / ENGINE_ERROR), tasks[0].target.label)
            stores = {task: store for task, store in stores.items() if not store.missing(config.n_sampling)}
        for task, store in stores.items():
            display.phase(f"scoring {task.benchmark}")
            with failures.recorded(task.target.label):
                results.append(score_samples(task, store.samples, config.n_sampling, verifiers))
        display.finish()
    return results


def in_one_line(error: Exception, log: Path) -> str:
    """A worker's error in one line; its traceback goes to the file ``log``."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    if len(lines) == 1:
        return lines[0]
    log.write_text(f"{error}\n")
    return f"{lines[0]} {lines[-1]}; its traceback is in {log}"


def open_stores(
    tasks: Sequence[EvaluationTask], config: EvaluationConfig, stack: ExitStack, failures: Failures
) -> dict[EvaluationTask, SampleStore]:
    """The stores of the tasks whose folders hold no other samples; prompts that the model does not take are told."""
    stores: dict[EvaluationTask, SampleStore] = {}
    notes: list[str] = []
    with failures.recorded(tasks[0].target.label):
        limit = ModelInfo.read(tasks[0].target.path, config.rollout.trust_remote_code).max_length
        for task in tasks:
            with failures.recorded(task.label):
                fitting, note = without_long_prompts(task, limit)
                stores[fitting] = stack.enter_context(fitting.open_store())
                if note and note not in notes:  # the same at every temperature
                    notes.append(note)
                    failures.display.say(f"warning: {note}")
    return stores


def generate_target(
    title: str,
    stores: Mapping[EvaluationTask, SampleStore],
    config: EvaluationConfig,
    session: RaySession,
    display: EvaluationDisplay,
) -> None:
    """Generate the missing samples, if there are any."""
    missing = {task: keys for task, store in stores.items() if (keys := store.missing(config.n_sampling))}
    if not missing:
        return
    tasks = list(missing)
    num_samples = sum(map(len, missing.values()))
    total = sum(config.n_sampling * len(store.answered) for store in stores.values())
    if num_samples < total:
        display.say(f"{title}: {total - num_samples} of {total} samples already exist")
    display.start(title, sum(len({problem for problem, _ in keys}) for keys in missing.values()), num_samples)
    limit = ModelInfo.read(tasks[0].target.path, config.rollout.trust_remote_code).max_length
    copies = config.rollout.tensor_parallel_size
    workers = start_engines(session, engine_model(tasks, config, limit), config)
    try:
        display.running()
        generate_missing(
            stores,
            config.n_sampling,
            config.seed,
            Exchange(workers, "advance", copies),
            workers.run("room")[::copies],
            workers.device_type == "cpu",
            display,
        )
    finally:
        workers.close()
