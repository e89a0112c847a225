"""Runs an evaluation based on a validated config and produces tables, curves and an HTML page.

If a benchmark or model fails, the error is printed, the evaluation continues, and the exit code is 1.
"""

from contextlib import ExitStack, closing
from dataclasses import replace
from itertools import chain
from pathlib import Path

from verl.checkpoint.attempts import run_lock
from verl.cluster.failures import WorkerError
from verl.config.errors import ConfigError
from verl.config.evaluation import EvaluationConfig
from verl.evaluation.generation import generate_target
from verl.evaluation.report.publish import publish
from verl.evaluation.reranking import Judge, load_reward_model, score_by_reward_model, with_scores
from verl.evaluation.results import TaskResult
from verl.evaluation.scoring import score_samples
from verl.evaluation.store import SampleKey
from verl.evaluation.targets import Target
from verl.evaluation.tasks import EvaluationTask, Job, prepare
from verl.rank.own_metrics import own_measures
from verl.rewards.pool import VerifierPool
from verl.run.display import sampling_display
from verl.utils.files import replace_text

ENGINE_ERROR = "engine_error.log"


def run_evaluation(config: EvaluationConfig) -> None:
    """Evaluate the models in ``config`` on its benchmarks.

    Raises:
        ConfigError: The config does not fit the machine, or another run is using the output folder.
        SystemExit: The exit code is 1 if some evaluations failed, or 130 after an interrupt.
    """
    own_measures(config.calculator.own_metrics)  # fail before any engine starts
    with sampling_display("evaluation", "samples") as display:
        job = prepare(config, "evaluation", display)
        if job is None:
            return
        session, count = job.session, len(job.tokenizers)
        judge = load_reward_model(config, session.device_type) if config.reward_model.path is not None else None
        with run_lock(job.folder):
            # The verifier processes start lazily, with the first sample to score.
            with session, closing(VerifierPool(config.reward_score, session.busy_cores, job.folder)) as verifiers:
                by_target: dict[Target, list[TaskResult]] = {}
                for place, target in enumerate(job.tokenizers, start=1):
                    title = f"{target.label} ({place}/{count})" if count > 1 else target.label
                    twin = next((other for other in by_target if other.same_model(target)), None)
                    if twin is not None:  # for example the shared base model of two runs
                        display.say(f"{target.label} is the model of {twin.label}, and has its results")
                        by_target[target] = [replace(r, run=target.run, step=target.step) for r in by_target[twin]]
                        continue
                    with display.recorded(target.label):
                        by_target[target] = _evaluate_target(job, target, title, verifiers, judge)
            if results := list(chain.from_iterable(by_target.values())):
                publish(job.folder, results, config, display, by_target)


def _evaluate_target(
    job: Job, target: Target, title: str, verifiers: VerifierPool, judge: Judge | None
) -> list[TaskResult]:
    """Generate the missing samples of one model, then score all samples with the verifiers and the ``judge``.

    Returns the results of the tasks that succeeded.
    """
    config, display, tasks = job.config, job.display, job.tasks_of(target)
    results: list[TaskResult] = []
    with ExitStack() as stack:
        stores = job.open_stores(tasks, stack)
        try:
            generate_target(job, target, title, stores)
        except (WorkerError, ConfigError) as error:
            # The log belongs in <folder>/<run>/step_N, above the benchmark and temperature folders.
            display.fail(in_one_line(error, tasks[0].folder.parents[1] / ENGINE_ERROR), target.label)
            stores = {task: store for task, store in stores.items() if not store.missing(config.n_sampling)}
        scores: dict[EvaluationTask, dict[SampleKey, float]] = {}
        try:
            scores = {} if judge is None else score_by_reward_model(job, stores, judge)
        except (WorkerError, ConfigError) as error:
            display.fail(in_one_line(error, tasks[0].folder.parents[1] / ENGINE_ERROR), f"{target.label}: reward model")
        for task, store in stores.items():
            display.phase(f"scoring {task.benchmark}")
            with display.recorded(target.label):
                result = score_samples(task, store.samples, config.n_sampling, verifiers, config.scored)
                results.append(with_scores(result, scores[task]) if task in scores else result)
    return results


def in_one_line(error: Exception, log: Path) -> str:
    """Summarise a worker's error in one line and write its traceback to ``log``."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    if len(lines) == 1:
        return lines[0]
    replace_text(log, f"{error}\n")
    return f"{lines[0]} {lines[-1]}; its traceback is in {log}"
