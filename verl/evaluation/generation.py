"""Generation: requests to the engines, and their responses into the stores."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from verl.evaluation.progress import EvaluationDisplay
from verl.evaluation.store import SampleStore, StoredSample
from verl.evaluation.tasks import EvaluationTask
from verl.rollout.queue import EngineRoom, RequestQueue
from verl.rollout.requests import FinishedSamples, SampleRequest, sample_stream
from verl.single_controller.exchange import Exchange
from verl.single_controller.generation import serve

STEPS_PER_CALL = 64
"""Engine steps between two replies of an engine: a second or two of decoding with a real model."""


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

    Raises:
        WorkerError: a worker raised or died; the samples it had returned are stored.
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
