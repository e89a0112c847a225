"""Generates responses by sending requests to the engines, and writes the responses to the sample stores."""

import math
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import fields

from transformers import PreTrainedTokenizerBase

from verl.batch import Batch
from verl.config.evaluation import EvaluationConfig
from verl.config.rollout import SamplingConfig, SamplingFilters
from verl.evaluation.store import SampleStore, StoredSample
from verl.evaluation.targets import Target
from verl.evaluation.tasks import EvaluationTask, Job, engine_model
from verl.rollout.engines import engine_environment
from verl.rollout.environments.conversations import ConversationSetup, policy_texts, session_parts, with_tools
from verl.rollout.environments.pool import COUNTS, ENVIRONMENT_LOG
from verl.rollout.multi_turn import begin_conversations, conversation_pool
from verl.rollout.requests import EngineModel, ResponseRequests, sample_stream
from verl.run.display import RunDisplay
from verl.run.session import RaySession
from verl.single_controller.generation import Generation
from verl.single_controller.worker_group import WorkerGroup

STEPS_PER_CALL = 64
"""Number of engine steps per call. With a real model, they take one or two seconds."""


def generate_target(job: Job, target: Target, title: str, stores: Mapping[EvaluationTask, SampleStore]) -> None:
    """Generate one model's missing samples.

    Raises ``WorkerError`` if an engine failed to start or died. Samples that were already returned remain stored.
    """
    config, session, display, tokenizer = job.config, job.session, job.display, job.tokenizers[target]
    missing = {task: keys for task, store in stores.items() if (keys := store.missing(config.n_sampling))}
    if not missing:
        return
    num_samples = sum(map(len, missing.values()))
    total = sum(config.n_sampling * len(store.answered) for store in stores.values())
    if num_samples < total:
        display.say(f"{title}: {total - num_samples} of {total} samples already exist")
    num_problems = sum(len({problem for problem, _ in keys}) for keys in missing.values())
    display.say(f"{title}: {num_samples} samples of {num_problems} problems to generate")
    display.begin(0, description=title, total=num_samples)
    model, turns = engine_model(list(missing), config), config.rollout.multi_turn
    with ExitStack() as stack:
        setup: ConversationSetup | None = None
        if turns.enable:
            log = next(iter(missing)).folder.parents[1] / ENVIRONMENT_LOG
            pool = stack.enter_context(conversation_pool(turns, session.busy_cores, log))
            limits = (model.max_model_len - model.max_response_length, model.max_response_length)
            texts = (with_tools(target.chat_arguments, turns), model.stop)
            setup = ConversationSetup(
                turns, *limits, tokenizer, *texts, pool, display.say, target.template, model.max_model_len
            )
        display.stage("starting the engines")
        workers = start_engines(session, model, config)
        stack.callback(workers.close)
        display.phase("generating")
        generate_missing(stores, config, workers, tokenizer, display, setup)


def start_engines(session: RaySession, model: EngineModel, config: EvaluationConfig) -> WorkerGroup:
    """Start workers that serve ``model``; the caller must close them. Raises ``WorkerError`` if loading fails."""
    calculator = config.calculator if config.calculator.enable else None
    worker, environment = "verl.workers.evaluation:EvaluationWorker", engine_environment(session.device_type)
    return session.start_workers(worker, config.rollout, (model, calculator), environment, [model.path])


def generate_missing(
    stores: Mapping[EvaluationTask, SampleStore],
    config: EvaluationConfig,
    workers: WorkerGroup,
    tokenizer: PreTrainedTokenizerBase,
    display: RunDisplay,
    conversations: ConversationSetup | None = None,
) -> None:
    """Generate the missing samples of every problem and store each sample as it arrives.

    All tasks share one stream of requests, so engines wait for the longest response only once instead of per task.

    Args:
        workers: Group of :class:`verl.workers.evaluation.EvaluationWorker`.
        conversations: Setup for multi-turn responses, or None for single-turn responses.
    """
    # A request is identified by its index in this list.
    samples = [(task, problem, i) for task, store in stores.items() for problem, i in store.missing(config.n_sampling)]
    left_of_problem = Counter((task, problem) for task, problem, _ in samples)
    filters = {field.name: getattr(config, field.name) for field in fields(SamplingFilters)}
    sampling = {t: SamplingConfig(n=1, temperature=t, **filters) for t in config.temperatures}
    requests = ResponseRequests(
        rows=range(len(samples)),
        prompt_ids=[task.prompts[problem] for task, problem, _ in samples],
        streams=[sample_stream(config.seed, task.benchmark, problem, i) for task, problem, i in samples],
        sampling=sampling[config.temperatures[0]],
        overrides=[sampling[task.temperature] for task, _, _ in samples],
    )
    stops = next(iter(stores)).settings["stop"]
    done, started = Counter[str](), time.monotonic()

    def store(part: Batch) -> None:
        lengths = part.policy_lengths.tolist()
        arrived: dict[EvaluationTask, list[StoredSample]] = defaultdict(list)
        texts, metrics = policy_texts(part, tokenizer, stops), finite_metrics(part)
        said, environments = session_parts(part, tokenizer), environment_figures(part)
        tokens = part.response_tokens.split(part.response_lengths.tolist())
        for row, place in enumerate(part.request.tolist()):
            task, problem, i = samples[place]
            left_of_problem[task, problem] -= 1
            done["problems"] += left_of_problem[task, problem] == 0
            ids = tokens[row].tolist() if task.settings.get("tokens", False) else []
            response = (texts[row], lengths[row], bool(part.truncated[row]), metrics[row])
            arrived[task].append(StoredSample(problem, i, *response, ids, said[row], environments[row]))
        for task, new in arrived.items():
            stores[task].append(new)
        done.update(samples=len(part), tokens=sum(lengths))
        seconds = time.monotonic() - started
        left = seconds * (len(samples) - done["samples"]) / max(done["samples"], 1)
        speed = {"tokens_per_s": done["tokens"] / max(seconds, 1e-9), "seconds_left": left}
        display.step(done["samples"], {"problems": done["problems"]} | speed)

    talks = None
    if conversations is not None:
        records = [
            task.problems[problem].record(problem, task.prompts[problem], task.opens_thought)
            for task, problem, _ in samples
        ]
        talks = begin_conversations(conversations, records)
    ranks_per_engine, on_cpu = config.rollout.tensor_parallel_size, workers.device_type == "cpu"
    Generation(
        workers, ranks_per_engine, requests, on_cpu, store, conversations=talks, steps_per_call=STEPS_PER_CALL
    ).run()


def environment_figures(part: Batch) -> list[dict[str, float]]:
    """Return the environment reward, turns and counts of each conversation, or empty dicts if there are none."""
    if "environment_rewards" not in part:
        return [{} for _ in range(len(part))]
    columns = zip(part.environment_rewards.tolist(), part.turns.tolist(), part.call_counts.tolist(), strict=True)
    return [
        {"reward": reward, "turns": float(turns)} | dict(zip(COUNTS, map(float, counts), strict=True))
        for reward, turns, counts in columns
    ]


def finite_metrics(batch: Batch) -> list[dict[str, float]]:
    """Return the finite rank metrics of each response, named ``layer_<i>/<name>`` if several layers are captured."""
    rows: list[dict[str, float]] = [{} for _ in range(len(batch))]
    for name, values in batch.rank_metrics.items():
        for row, layers in zip(rows, values.tolist(), strict=True):
            names = [name] if len(layers) == 1 else [f"layer_{layer}/{name}" for layer in range(1, len(layers) + 1)]
            row |= {key: value for key, value in zip(names, layers, strict=True) if math.isfinite(value)}
    return rows
