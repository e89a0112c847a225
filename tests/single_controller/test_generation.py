"""Dealing requests to engines: the real queue and loop, with engines that count steps and with Ray's workers."""

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from statistics import NormalDist
from typing import Any

import pytest
import torch

from verl.batch import Batch
from verl.cluster.failures import WorkerError
from verl.data.prompt_record import PromptRecord
from verl.rollout.queue import EngineCapacity, RequestQueue
from verl.rollout.requests import ResponseRequests
from verl.single_controller import generation
from verl.single_controller.generation import EngineCalls, Generation


class SimulatedEngines:
    """In place of a worker group and of the calls of its engines.

    Engines decode one token of each response per step, at the speed given, as many responses as have a slot.
    """

    def __init__(self, lengths: Sequence[int], slots: int, speeds: Sequence[float]) -> None:
        self.lengths, self.slots, self.speeds = lengths, slots, speeds
        self.clocks = [0.0] * len(speeds)
        self.running: list[dict[int, int]] = [{} for _ in speeds]
        self.waiting: list[list[int]] = [[] for _ in speeds]
        self.dealt: list[list[int]] = [[] for _ in speeds]
        self.ends = [0.0] * len(speeds)
        self._replies: dict[int, tuple[Batch | None, int]] = {}
        self.lost_at: dict[int, float] = {}
        """When engines are lost, by their clocks."""

    def run_living(self, method: str) -> list[EngineCapacity]:
        assert method == "start_generation"
        return [EngineCapacity(self.slots, 1 << 30)] * len(self.speeds)

    @property
    def busy(self) -> bool:
        return bool(self._replies)

    def send(self, engine: int, asked: ResponseRequests, max_steps: int) -> None:
        assert engine not in self._replies
        requests = list(asked.rows)
        self.dealt[engine] += requests
        self.waiting[engine] += requests
        running, waiting, finished = self.running[engine], self.waiting[engine], []
        for _ in range(max_steps):
            while waiting and len(running) < self.slots:
                running[waiting.pop(0)] = 0
            if not running:
                break
            self.clocks[engine] += 1 / self.speeds[engine]
            for request in list(running):
                running[request] += 1
                if running[request] == self.lengths[request]:
                    finished.append(request)
                    del running[request]
        self.ends[engine] = self.clocks[engine] if finished else self.ends[engine]
        ended = Batch.of([[]] * len(finished), [[]] * len(finished), request=torch.tensor(finished, dtype=torch.int64))
        self._replies[engine] = (ended if finished else None, len(waiting))

    def receive(self, from_all: bool) -> list[tuple[int, tuple[Batch | None, int] | None]]:
        for engine in self._replies:
            if self.clocks[engine] >= self.lost_at.get(engine, math.inf):
                del self._replies[engine]
                return [(engine, None)]
        engines = sorted(self._replies) if from_all else [min(self._replies, key=lambda e: (self.clocks[e], e))]
        if from_all:
            # All wait for the last.
            latest = max(self.clocks[engine] for engine in engines)
            for engine in engines:
                self.clocks[engine] = latest
        else:
            now = self.clocks[engines[0]]
            assert now <= min(self.clocks[engine] for engine in self._replies)
        return [(engine, self._replies.pop(engine)) for engine in engines]

    @property
    def makespan(self) -> float:
        return max(self.ends)

    def serve(self, deterministic: bool) -> Generation:
        """Have them sample; checks that each response is finished once."""
        rows, finished = range(len(self.lengths)), list[int]()
        requests = ResponseRequests(rows, [[5]] * len(rows), [0] * len(rows), sampling=None)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(generation, "EngineCalls", lambda workers, *_: workers)
            served = Generation(self, 1, requests, deterministic, lambda part: finished.extend(part.request.tolist()))
            served.run()
        assert sorted(finished) == list(rows)
        assert served.queue.held == [0] * len(self.speeds) and served.queue.left == 0
        return served


def simulate(
    lengths: Sequence[int], num_engines: int, slots: int, deterministic: bool, speeds: Sequence[float] | None = None
) -> SimulatedEngines:
    """Serve requests of so many tokens."""
    engines = SimulatedEngines(lengths, slots, speeds or [1.0] * num_engines)
    engines.serve(deterministic)
    return engines


def skewed(count: int, seed: int) -> list[int]:
    """Log-normal lengths around 300 whose longest is some ten times the median."""
    draw = random.Random(seed)
    # The largest of N draws is some quantile 1 - 1 / 2N.
    sigma = math.log(10) / NormalDist().inv_cdf(1 - 1 / (2 * count))
    return [max(1, round(300 * math.exp(sigma * draw.gauss(0, 1)))) for _ in range(count)]


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize(("num_engines", "slots"), [(4, 64), (64, 16)])
def test_engines_end_together(num_engines: int, slots: int, deterministic: bool):
    """The least that any order can take is the longest response, or all tokens over all slots."""
    for per_slot in (1, 64):
        lengths = skewed(per_slot * slots * num_engines, seed=per_slot)
        assert 5 < max(lengths) / 300 < 20
        ideal = max(max(lengths), sum(lengths) / (num_engines * slots))
        assert simulate(lengths, num_engines, slots, deterministic).makespan < 1.1 * ideal


def test_who_gets_what_depends_on_lengths_alone():
    lengths = skewed(2000, seed=0)
    alike, unlike = (simulate(lengths, 4, 16, True, speeds=speeds) for speeds in ([1.0] * 4, [1.0, 0.5, 2.0, 0.7]))
    assert alike.dealt == unlike.dealt
    # Where it may depend on time, the faster engine does more.
    free = simulate(lengths, 4, 16, False, speeds=[1.0, 0.5, 2.0, 0.7])
    shares = [len(dealt) for dealt in free.dealt]
    assert shares[2] > shares[0] > shares[3] > shares[1] and free.makespan < unlike.makespan


def test_what_fits_is_dealt_at_once_in_the_order_of_the_prompts():
    queue = RequestQueue(10, [EngineCapacity(4, 9)] * 3)
    assert queue.first() == [range(0, 3), range(3, 6), range(6, 10)] and queue.left == 0
    queue = RequestQueue(2, [EngineCapacity(4, 9)] * 3)
    assert [len(share) for share in queue.first()] == [0, 1, 1]


def test_an_engine_whose_cache_is_full_gets_nothing_more():
    queue = RequestQueue(100, [EngineCapacity(32, 8), EngineCapacity(32, 8)])
    assert queue.first() == [range(0, 8), range(8, 16)]
    # Nothing waits: there is room for half as many again. One waits although a slot is free: the cache is full.
    queue.finish(0, 0, 0)
    queue.finish(1, 4, 1)
    assert queue.take(0) == range(16, 21) and queue.take(1) == range(21, 21)
    queue.finish(1, 3, 0)
    assert queue.take(1) == range(21, 33)


def test_a_single_engine_begins_with_all_its_slots():
    assert RequestQueue(30, [EngineCapacity(32, 8)]).first() == [range(0, 30)]
    assert RequestQueue(30, [EngineCapacity(32, 8)] * 2).first() == [range(0, 8), range(8, 16)]


def test_work_is_taken_ahead_while_much_is_left():
    queue = RequestQueue(46, [EngineCapacity(8, 99), EngineCapacity(8, 99)])
    # 30 are left beside the slots: a quarter of them for each.
    assert queue.first() == [range(0, 15), range(15, 30)]
    queue.finish(0, 8, 0)
    assert queue.take(0) == range(30, 35)
    queue.finish(1, 12, 0)
    assert queue.take(1) == range(35, 42) and queue.left == 4


def test_others_get_what_a_lost_engine_has_not_returned():
    engines = SimulatedEngines(skewed(400, seed=0), 16, [1.0] * 3)
    engines.lost_at = {1: 100.0, 2: 2000.0}
    queue = engines.serve(False).queue
    # Nothing more was dealt to those that were lost.
    assert engines.clocks[0] > 2000 > engines.clocks[1] and not queue.take(1)


class LosesAnEngineInCut:
    """In place of a pool of two engines, of which the second is lost as responses are cut. Response i has i tokens."""

    def __init__(self) -> None:
        self.living, self.given = [0, 1], dict[int, list[int]]()

    def call(self, rank: int, method: str, arguments: tuple[ResponseRequests, int]) -> tuple[int, int]:
        assert method == "rollout.advance"
        self.given.setdefault(rank, []).extend(arguments[0].rows)
        return rank, len(self.given)

    def completed(self, calls: dict[Any, int], method: str, started: float) -> Any:
        # Of the first engine one has ended.
        for call, rank in calls.items():
            yield call, (episodes(self.given[0][:1]) if rank == 0 else None, 0)

    def received(self, reply: Any) -> Any:
        return reply

    def run_living(self, method: str) -> list[Any]:
        if method == "start_generation":
            return [EngineCapacity(4, 4)] * 2
        assert method == "rollout.cut"
        self.living = [0]
        return [episodes(self.given[0][1:], more=3)]


def episodes(rows: list[int], more: int = 0) -> Batch:
    return Batch.of([[5]] * len(rows), [[6] * (row + more) for row in rows], request=torch.tensor(rows))


def test_what_a_lost_engine_was_to_cut_is_left_as_it_was():
    pool, finished = LosesAnEngineInCut(), list[int]()
    requests = ResponseRequests(range(6), [[5]] * 6, [0] * 6, sampling=None, partial=episodes([*range(6)]))
    take, enough = lambda part: finished.extend(part.request.tolist()), lambda ended: len(ended) == 1  # noqa: E731
    cut, _ = Generation(pool, 1, requests, True, take, enough).run()
    assert pool.given == {0: [0, 1, 2], 1: [3, 4, 5]} and finished == [0]
    left = {
        int(row): int(length) for part in cut for row, length in torch.stack([part.request, part.response_lengths], 1)
    }
    # The first engine's go on; the second's begin where they were.
    assert left == {1: 4, 2: 5, 3: 3, 4: 4, 5: 5}


@pytest.mark.parametrize("copies", [1, 2, 4])
def test_each_engine_replies_with_its_first_worker(workers, copies: int):
    engines = EngineCalls(workers, "take_as_long", copies)
    assert not engines.busy
    for engine in range(4 // copies):
        # The first engine takes longest.
        engines.send(engine, 0.5 if engine == 0 else 0.0)
    order: list[tuple[int, int]] = []
    while engines.busy:
        order += engines.receive(from_all=False)
    assert sorted(order) == [(engine, engine * copies) for engine in range(4 // copies)] and order[-1] == (0, 0)


def test_all_can_be_waited_for_and_any_be_sent_more(workers):
    engines = EngineCalls(workers, "take_as_long", 1)
    for engine in (3, 0, 2):
        engines.send(engine, 0.0)
    assert engines.receive(from_all=True) == [(0, 0), (2, 2), (3, 3)] and not engines.busy
    engines.send(1, 30.0)
    for _ in range(3):
        engines.send(0, 0.0)
        assert engines.receive(from_all=False) == [(0, 0)]
    engines.send(2, -1.0)
    # Worker 1 still works, and nobody waits for it.
    with pytest.raises(WorkerError, match="(?s)^worker 2 on [^ ]+ failed in take_as_long:.*non-negative"):
        engines.receive(from_all=True)


def test_prompt_twice_in_a_batch_has_streams_of_its_own(monkeypatch, small_config):
    sampling = replace(small_config.rollout.train_kwargs, n=2)

    def streams(*uids: int) -> list[int]:
        def sample(_workers, _copies, requests, *_):
            raise RuntimeError(requests.streams)

        monkeypatch.setattr(generation, "Generation", lambda *engines, **_: sample(*engines))
        records = [PromptRecord(uid, [5], "arithmetic", "7", {}, [], False) for uid in uids]
        with pytest.raises(RuntimeError) as raised:
            generation.generate_responses(None, 1, records, sampling, seed=0, max_response_length=9)
        return raised.value.args[0]

    assert len(set(streams(3, 0, 3))) == 6 and streams(3, 0, 3)[:4] == streams(3, 0)
    # As many responses to one prompt would have.
    assert streams(3, 3, 0)[:4] == streams(3, 0, 3)[:2] + streams(3, 0, 3)[4:]
