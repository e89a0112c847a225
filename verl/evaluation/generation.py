"""Generation: requests to the engines, and their responses into the stores."""

from collections import Counter, defaultdict, deque
from collections.abc import Mapping

from verl.evaluation.progress import EvaluationDisplay
from verl.evaluation.store import SampleStore, StoredSample
from verl.evaluation.tasks import EvaluationTask
from verl.rollout.requests import SampleRequest, sample_seed
from verl.single_controller import WorkerGroup

STEPS_PER_CALL = 64
"""Engine steps between two collections of finished responses: a second or two of decoding with a real model."""

QUEUED_PER_SEQUENCE = 2
"""Requests that an engine holds per sequence it decodes at once, so that none idles until the next collection."""


def generate_missing(
    stores: Mapping[EvaluationTask, SampleStore],
    n: int,
    seed: int,
    workers: WorkerGroup,
    num_engines: int,
    max_num_seqs: int,
    display: EvaluationDisplay,
) -> None:
    """Generate what is missing of the first ``n`` samples of every problem; each sample is stored as it arrives.

    All tasks form one stream, so that engines wait for the longest response once and not once per benchmark.

    Raises:
        WorkerError: a worker raised or died; the samples it had returned are stored.
    """
    # A request's key is its place in this list.
    samples = [(task, problem, i) for task, store in stores.items() for problem, i in store.missing(n)]
    waiting = deque(range(len(samples)))
    loads = [0] * num_engines
    engine_of: dict[int, int] = {}
    left_of_problem = Counter((task, problem) for task, problem, _ in samples)
    while waiting or engine_of:
        requests: list[list[SampleRequest]] = [[] for _ in range(num_engines)]
        while waiting and min(loads) < QUEUED_PER_SEQUENCE * max_num_seqs:
            engine = loads.index(min(loads))
            key = waiting.popleft()
            task, problem, i = samples[key]
            own_seed = sample_seed(seed, task.benchmark, problem, i)
            requests[engine].append(SampleRequest(key, task.prompts[problem], own_seed, task.temperature))
            engine_of[key] = engine
            loads[engine] += 1
        finished = [sample for part in workers.run("advance", requests, STEPS_PER_CALL) for sample in part]
        problems_done = 0
        arrived: dict[EvaluationTask, list[StoredSample]] = defaultdict(list)
        for found in finished:
            loads[engine_of.pop(found.key)] -= 1
            task, problem, i = samples[found.key]
            left_of_problem[task, problem] -= 1
            problems_done += left_of_problem[task, problem] == 0
            text, length, cut = found.response, found.num_tokens, found.truncated
            arrived[task].append(StoredSample(problem, i, text, length, cut, found.metrics, found.token_ids))
        for task, new in arrived.items():
            stores[task].append(new)
        display.generated(problems_done, len(finished), sum(found.num_tokens for found in finished))
