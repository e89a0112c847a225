"""One evaluation, from a checked config to tables, curves and a page.

If one benchmark or model fails, a line says so, the others are evaluated, and the exit code is 1.
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from verl.checkpoint.attempts import run_lock
from verl.config.errors import ConfigError
from verl.config.evaluation import EvaluationConfig
from verl.evaluation.benchmarks import Problem
from verl.evaluation.generation import generate_target
from verl.evaluation.progress import EvaluationDisplay, displayed
from verl.evaluation.report.publish import publish
from verl.evaluation.results import TaskResult
from verl.evaluation.scoring import score_samples
from verl.evaluation.store import SampleStore
from verl.evaluation.targets import Target, select_targets
from verl.evaluation.tasks import EvaluationTask, load_problems, load_target_tokenizer, make_tasks
from verl.rank.own_metrics import own_measures
from verl.rewards.pool import VerifierPool
from verl.run.session import RaySession
from verl.run.sinks import check_trackers
from verl.single_controller.cluster import gpus_per_machine, resolve_device
from verl.single_controller.failures import WorkerError

ENGINE_ERROR = "engine_error.log"

CPU_WORKERS = 2
"""Worker processes on a CPU that has as many cores, if the config does not set their number."""


@dataclass(frozen=True)
class Job:
    """An evaluation or an analysis, checked and loaded before its engines start."""

    config: EvaluationConfig
    """How responses are sampled."""
    display: EvaluationDisplay
    folder: Path
    """Folder of the results."""
    session: RaySession
    benchmarks: Mapping[str, list[Problem]]
    tokenizers: Mapping[Target, PreTrainedTokenizerBase]
    """Tokenizer of each target."""

    def tasks_of(self, target: Target) -> list[EvaluationTask]:
        tokenizer, device_type = self.tokenizers[target], self.session.device_type
        return make_tasks(target, tokenizer, self.benchmarks, self.config, self.folder, device_type, self.display)

    def open_stores(self, tasks: Sequence[EvaluationTask], stack: ExitStack) -> dict[EvaluationTask, SampleStore]:
        """The stores of the tasks whose folders hold no other samples."""
        stores = {}
        for task in tasks:
            with self.display.recorded(task.label):
                stores[task] = stack.enter_context(task.open_store())
        return stores


def run_evaluation(config: EvaluationConfig) -> None:
    """Evaluate the models on the benchmarks that ``config`` names.

    Raises:
        ConfigError: the config does not fit the machine, or another run is using the folder.
        SystemExit: with 1 if some evaluations failed; with 130 after an interrupt.
    """
    own_measures(config.calculator.own_metrics)  # checked before an engine starts
    with displayed("samples") as display:
        job = prepare(config, "evaluation", display)
        if job is None:
            return
        session, count = job.session, len(job.tokenizers)
        with run_lock(job.folder):
            results: list[TaskResult] = []
            # The verifiers' processes start with the first sample to score.
            with session, closing(VerifierPool(config.reward_score, session.busy_cores)) as verifiers:
                for place, target in enumerate(job.tokenizers, start=1):
                    title = f"{target.label} ({place}/{count})" if count > 1 else target.label
                    with display.recorded(target.label):
                        results += _evaluate_target(job, target, title, verifiers)
            if results:
                publish(job.folder, results, config, display)


def prepare(
    config: EvaluationConfig,
    kind: str,
    display: EvaluationDisplay,
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
    targets, folder_name = select_targets(config, display)
    benchmarks: dict[str, list[Problem]] = {}
    for name in config.benchmarks:
        with display.recorded():
            benchmarks[name] = load_problems(name, config)
    display.missing_benchmarks += [name for name in config.benchmarks if name not in benchmarks]
    benchmarks |= more_benchmarks or {}
    tokenizers = {}
    for target in targets:
        with display.recorded(target.label):
            tokenizers[target] = load_target_tokenizer(target, config.rollout.trust_remote_code)
    if not benchmarks or not tokenizers:
        return None
    default = Path(config.runs_dir, kind, trainer.experiment_name, folder_name)
    folder = Path(trainer.default_local_dir or default).resolve()
    display.say(
        f"{', '.join(target.label for target in tokenizers)} on {', '.join(benchmarks)}: {config.n_sampling} samples "
        f"for each of {sum(map(len, benchmarks.values()))} problems, into {folder}"
    )
    session = RaySession(trainer.nnodes, workers_per_node, device_type, trainer, folder)
    return Job(config, display, folder, session, benchmarks, tokenizers)


def count_workers(config: EvaluationConfig, device_type: str) -> int:
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


def _evaluate_target(job: Job, target: Target, title: str, verifiers: VerifierPool) -> list[TaskResult]:
    """Generate the missing samples of one model and score all; the results of the tasks that succeeded."""
    config, display, results = job.config, job.display, []
    tasks = job.tasks_of(target)
    with ExitStack() as stack:
        stores = job.open_stores(tasks, stack)
        try:
            generate_target(title, stores, config, job.session, display)
        except (WorkerError, ConfigError) as error:
            # <folder>/<run>/step_N, above benchmark and temperature.
            display.fail(in_one_line(error, tasks[0].folder.parents[1] / ENGINE_ERROR), target.label)
            stores = {task: store for task, store in stores.items() if not store.missing(config.n_sampling)}
        for task, store in stores.items():
            display.phase(f"scoring {task.benchmark}")
            with display.recorded(target.label):
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
