"""Generation: requests to the engines, and their responses into the stores."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from verl.config.evaluation import EvaluationConfig
from verl.evaluation.progress import EvaluationDisplay
from verl.evaluation.store import SampleStore, StoredSample
from verl.evaluation.tasks import EvaluationTask, engine_model
from verl.rollout import engine_environment
from verl.rollout.queue import EngineRoom, RequestQueue
from verl.rollout.requests import EngineModel, FinishedSamples, SampleRequest, sample_stream
from verl.run.session import RaySession
from verl.single_controller.generation import Exchange, serve
from verl.single_controller.worker_group import WorkerGroup

STEPS_PER_CALL = 64
"""Engine steps between two replies of an engine: a second or two of decoding with a real model."""


def generate_target(
    title: str,
    stores: Mapping[EvaluationTask, SampleStore],
    config: EvaluationConfig,
    session: RaySession,
    display: EvaluationDisplay,
) -> None:
    """Generate the missing samples of one model, if there are any.

    Raises:
        WorkerError: an engine did not start or died; the samples it had returned are stored.
    """
    missing = {task: keys for task, store in stores.items() if (keys := store.missing(config.n_sampling))}
    if not missing:
        return
    num_samples = sum(map(len, missing.values()))
    total = sum(config.n_sampling * len(store.answered) for store in stores.values())
    if num_samples < total:
        display.say(f"{title}: {total - num_samples} of {total} samples already exist")
    display.start(title, sum(len({problem for problem, _ in keys}) for keys in missing.values()), num_samples)
    workers = start_engines(session, engine_model(list(missing), config), config)
    try:
        display.running()
        copies = config.rollout.tensor_parallel_size
        rooms = workers.run("room")[::copies]
        engines, deterministic = Exchange(workers, "advance", copies), workers.device_type == "cpu"
        generate_missing(stores, config.n_sampling, config.seed, engines, rooms, deterministic, display)
    finally:
        workers.close()


def start_engines(session: RaySession, model: EngineModel, config: EvaluationConfig) -> WorkerGroup:
    """Workers that hold ``model``, to be closed by the caller. Raises ``WorkerError`` if one cannot load it."""
    calculator = config.calculator if config.calculator.enable else None
    worker, environment = "verl.workers.evaluation:EvaluationWorker", engine_environment(session.device_type)
    return session.start_workers(worker, config.rollout, (model, calculator), environment, [model.path])


def generate_missing(
    stores: Mapping[EvaluationTask, SampleStore],
    n: int,
    seed: int,
    engines: Exchange,
    rooms: Sequence[EngineRoom],
    deterministic: bool,
    display: EvaluationDisplay,
) -> None:
    """Generate what is missing of the first ``n`` samples of every problem; each sample is stored as it arrives.

    All tasks form one stream, so that engines wait for the longest response once and not once per benchmark.

    Args:
        engines: those of :meth:`verl.workers.evaluation.EvaluationWorker.advance`.
        deterministic: see :func:`verl.single_controller.generation.serve`.
    """
    # A request's key is its place in this list.
    samples = [(task, problem, i) for task, store in stores.items() for problem, i in store.missing(n)]
    left_of_problem = Counter((task, problem) for task, problem, _ in samples)

    def message(keys: Sequence[int]) -> tuple[list[SampleRequest], int]:
        requests = []
        for key in keys:
            task, problem, i = samples[key]
            stream = sample_stream(seed, task.benchmark, problem, i)
            requests.append(SampleRequest(key, task.prompts[problem], stream, task.temperature))
        return requests, STEPS_PER_CALL

    def take(reply: FinishedSamples) -> tuple[int, int]:
        problems_done = 0
        arrived: dict[EvaluationTask, list[StoredSample]] = defaultdict(list)
        for sample in reply.samples:
            task, problem, i = samples[sample.key]
            left_of_problem[task, problem] -= 1
            problems_done += left_of_problem[task, problem] == 0
            text, length, cut = sample.response, sample.num_tokens, sample.truncated
            arrived[task].append(StoredSample(problem, i, text, length, cut, sample.metrics, sample.token_ids))
        for task, new in arrived.items():
            stores[task].append(new)
        display.generated(problems_done, len(reply.samples), sum(sample.num_tokens for sample in reply.samples))
        return reply.num_ended, reply.num_waiting

    serve(RequestQueue(len(samples), rooms), engines, message, take, deterministic)
