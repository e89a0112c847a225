"""Runs an analysis, from a validated config to tables, correlations, figures and an HTML page.

Responses are generated and stored as in an evaluation. Workers then run a forward pass of the model over its responses,
and reduce hidden states and vocabulary distributions to metrics.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import pandas as pd

from verl.analysis.measure import MeasureFile, measure_missing, measure_settings, measuring, prompts_of
from verl.analysis.publish import publish
from verl.analysis.sheets import MODEL, check_pairs, prompt_row, response_row
from verl.checkpoint.attempts import run_lock
from verl.cluster.failures import WorkerError
from verl.config.analysis import AnalysisConfig
from verl.config.errors import ConfigError
from verl.data.prompts import PromptLayout
from verl.evaluation.benchmarks import Problem, load_prompts
from verl.evaluation.evaluate import in_one_line
from verl.evaluation.generation import generate_target
from verl.evaluation.scoring import score_batches
from verl.evaluation.store import SampleKey, SampleStore
from verl.evaluation.targets import Target
from verl.evaluation.tasks import EvaluationTask, Job, check_answers, prepare
from verl.models.info import ModelInfo, resolve_layers
from verl.rank.own_metrics import own_measures
from verl.rewards import use_custom_functions
from verl.rewards.pool import VerifierPool
from verl.run.display import sampling_display
from verl.single_controller.worker_group import WorkerGroup
from verl.utils.portable import valid_unicode
from verl.verifiers.verdict import Verdict
from verl.workers.measurements import MeasuredPrompt
from verl_pages.run_folder import SUMMARY

Tables = tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]
"""Tables of responses, of prompts, and of metrics by token position in the response."""


def run_analysis(config: AnalysisConfig) -> None:
    """Analyse the models in ``config`` on its benchmarks and prompts.

    Raises:
        ConfigError: The config does not fit the machine, or another run is using the output folder.
        SystemExit: The exit code is 1 if some models or benchmarks failed, or 130 after an interrupt.
    """
    check_pairs(config)
    own_measures(config.calculator.own_metrics)  # fail before any engine starts
    use_custom_functions(config.reward_score.paths_of_custom_functions(), config.reward_score.function_kwargs)
    with sampling_display("analysis", "samples and measurements") as display:
        files: dict[str, list[Problem]] = {}
        for path in config.analysis.prompt_files:
            with display.recorded():
                name, files[name] = read_prompt_file(path, config)
        job = prepare(config, "analysis", display, files)
        if job is None:
            return
        # The engines only sample; hidden states are measured later, when the policy re-reads the responses.
        job = replace(job, config=config.sampling(list(job.benchmarks)))
        tables: list[Tables] = []
        with run_lock(job.folder):
            # The summary marks a complete analysis, so remove an old one.
            (job.folder / SUMMARY).unlink(missing_ok=True)
            with job.session, closing(VerifierPool(config.reward_score, job.session.busy_cores)) as verifiers:
                for target in job.tokenizers:
                    try:
                        for part in _analyse_target(job, target, config, verifiers):
                            tables.append(part)
                    except (ConfigError, WorkerError) as error:
                        display.fail(in_one_line(error, job.folder / "error.log"), target.label)
            if tables:
                publish(job.folder, config, display, *map(pd.concat, zip(*tables, strict=True)))


def read_prompt_file(path: str, config: AnalysisConfig) -> tuple[str, list[Problem]]:
    """Return the name and the first ``data.max_problems`` prompts of a file in veRL's format or a hub dataset.

    Raises ``ConfigError`` if the file cannot be read, or if a prompt is not a single user turn or has no verifier.
    """
    problems = load_prompts(path, config.data.limit, PromptLayout())
    for problem in problems:
        if problem.messages:
            count = len(problem.messages)
            raise ConfigError(
                f"{problem.place}: prompt: must be a single user turn for an analysis; it has {count} messages"
            )
    check_answers(problems, config)
    return Path(path).stem, problems


def _analyse_target(job: Job, target: Target, config: AnalysisConfig, verifiers: VerifierPool) -> Iterator[Tables]:
    """Generate, measure and score the responses of one model, and yield the tables of each task."""
    info = ModelInfo.read(target.path, config.rollout.trust_remote_code)
    resolve_layers(config.calculator.layers, info.num_layers)
    tasks = [replace(task, settings=task.settings | {"tokens": True}) for task in job.tasks_of(target)]
    with ExitStack() as stack:
        stores = job.open_stores(tasks, stack)
        generate_target(job, target, target.label, stores)
        measured = _measure(job, stores, config)
        for task, store in stores.items():
            job.display.say(f"{task.label}: scoring and comparing the responses")
            if store.answered:
                yield _tables(task, store, measured[task], config, verifiers)


def _measure(
    job: Job, stores: Mapping[EvaluationTask, SampleStore], config: AnalysisConfig
) -> dict[EvaluationTask, dict[int, MeasuredPrompt]]:
    """Return the policy's measurements of each task's responses, computing only those that are missing."""
    session = job.session
    on_cpu = session.device_type == "cpu"
    results: dict[EvaluationTask, dict[int, MeasuredPrompt]] = {}
    workers: WorkerGroup | None = None
    with ExitStack() as stack:
        for task, store in stores.items():
            file = stack.enter_context(MeasureFile(task.folder, measure_settings(config, on_cpu)))
            prompts = prompts_of(task, store, config.n_sampling)
            if missing := sum(file.get(prompt) is None for prompt in prompts):
                if workers is None:
                    model = config.policy.model_config(task.target.path, config.rollout.trust_remote_code, on_cpu)
                    arguments = (measuring(config), config.layer_place, config.policy.micro_batch_size)
                    role = "verl.workers.analysis:AnalysisWorker"
                    workers = session.start_workers(role, model, arguments, {}, [task.target.path])
                    stack.callback(workers.close)
                job.display.say(f"{task.label}: reading the responses to {missing} prompts")
                measure_missing(file, prompts, task.temperature, workers, session.world_size)
            results[task] = {prompt.key: found for prompt in prompts if (found := file.get(prompt)) is not None}
    return results


def _tables(
    task: EvaluationTask,
    store: SampleStore,
    measured: Mapping[int, MeasuredPrompt],
    config: AnalysisConfig,
    verifiers: VerifierPool,
) -> Tables:
    numbers = range(config.n_sampling)
    keys = [(i, j) for i in store.answered for j in numbers]
    scores: dict[SampleKey, Verdict] = {}
    for batch in score_batches(task, store.samples, keys, verifiers):
        scores |= batch
    responses, prompts, courses = [], [], []
    for i in store.answered:
        problem = task.problems[i]
        names = (task.target.run, task.target.step, task.benchmark, task.temperature)
        place = dict(zip(MODEL, names, strict=True)) | {"prompt_id": i}
        samples = [store.samples[i, j] for j in numbers]
        metrics, source = [], valid_unicode(problem.data_source)
        for j, sample in enumerate(samples):
            metrics.append(response_row(config, sample, scores[i, j], problem, measured[i].responses[j]))
            at = place | {"rollout_id": j}
            responses.append(at | {"data_source": source} | metrics[-1])
            course = measured[i].courses[j]
            correct = {"correctness": metrics[-1]["correctness"], "tokens": course.ends}
            courses.append(pd.DataFrame(at | correct | course.values))
        prompt = prompt_row(config, samples, metrics, measured[i])
        prompts.append(place | {"rollout_id": -1, "data_source": source} | prompt)
    return pd.DataFrame(responses), pd.DataFrame(prompts), pd.concat(courses)
