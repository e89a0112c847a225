"""Feeding the engines with requests, and their responses to the stores."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from verl.evaluation.jobs import Job
from verl.evaluation.progress import EvaluationDisplay
from verl.evaluation.store import SampleKey, SampleStore, StoredSample
from verl.rollout.requests import FinishedSample, SampleRequest, sample_seed
from verl.single_controller import WorkerGroup

STEPS_PER_CALL = 64
"""Engine steps between two looks at what has finished: a second or two of decoding with a real model."""

QUEUED_PER_SEQUENCE = 2
"""Requests that an engine holds for each sequence it decodes at once, so that none is idle until the next look."""


@dataclass(frozen=True)
class Work:
    """A job and the samples that it has so far."""

    job: Job
    store: SampleStore

    def missing(self, n: int) -> list[SampleKey]:
        """Which of the first ``n`` samples of all problems are not there."""
        return self.store.missing(len(self.job.problems), n)


@dataclass(frozen=True)
class _Place:
    """What a request is for."""

    work: Work
    problem: int
    sample: int


def generate_missing(
    works: Sequence[Work],
    n: int,
    seed: int,
    workers: WorkerGroup,
    num_engines: int,
    max_num_seqs: int,
    display: EvaluationDisplay,
) -> None:
    """Generate what is missing of the first ``n`` samples of every problem; each sample is stored as it comes.

    All jobs are one stream, so that engines wait for the longest response once and not once per benchmark.

    Raises:
        WorkerError: a worker raised or died; what it had returned before is stored.
    """
    places = [_Place(work, i, j) for work in works for i, j in work.missing(n)]
    waiting = deque(range(len(places)))
    loads = [0] * num_engines
    engine_of: dict[int, int] = {}
    left_of_problem: dict[tuple[int, int], int] = {}
    for place in places:
        problem = (id(place.work), place.problem)
        left_of_problem[problem] = left_of_problem.get(problem, 0) + 1
    while waiting or engine_of:
        shares: list[list[SampleRequest]] = [[] for _ in range(num_engines)]
        while waiting and min(loads) < QUEUED_PER_SEQUENCE * max_num_seqs:
            engine = loads.index(min(loads))
            key = waiting.popleft()
            shares[engine].append(_request(key, places[key], seed))
            engine_of[key] = engine
            loads[engine] += 1
        finished = [sample for part in workers.run("advance", shares, STEPS_PER_CALL) for sample in part]
        problems_done = 0
        for sample in finished:
            loads[engine_of.pop(sample.key)] -= 1
            place = places[sample.key]
            problem = (id(place.work), place.problem)
            left_of_problem[problem] -= 1
            problems_done += left_of_problem[problem] == 0
        _store(finished, places)
        display.generated(problems_done, len(finished), sum(sample.num_tokens for sample in finished))


def _request(key: int, place: _Place, seed: int) -> SampleRequest:
    job = place.work.job
    return SampleRequest(
        key=key,
        prompt_ids=job.prompts[place.problem],
        seed=sample_seed(seed, job.benchmark, place.problem, place.sample),
        temperature=job.temperature,
    )


def _store(finished: Sequence[FinishedSample], places: Sequence[_Place]) -> None:
    by_store: dict[int, tuple[SampleStore, list[StoredSample]]] = {}
    for sample in finished:
        place = places[sample.key]
        _, samples = by_store.setdefault(id(place.work), (place.work.store, []))
        samples.append(
            StoredSample(
                problem=place.problem,
                sample=place.sample,
                response=sample.response,
                num_tokens=sample.num_tokens,
                truncated=sample.truncated,
                metrics=sample.metrics,
            )
        )
    for store, samples in by_store.values():
        store.append(samples)
