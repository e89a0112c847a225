"""Dealing requests to engines on a simulated clock: the real queue and the real loop, engines that count steps."""

import heapq
import math
import random
from collections.abc import Sequence
from statistics import NormalDist

import pytest

from verl.rollout.queue import EngineRoom, RequestQueue
from verl.single_controller.generation import serve

STEPS = 32


class SimulatedEngines:
    """Engines that decode one token of each response per step, at the speed given, as many responses as have a slot."""

    def __init__(self, lengths: Sequence[int], slots: int, cache: int, speeds: Sequence[float]) -> None:
        self.lengths = lengths
        self.slots, self.cache = slots, cache
        self.speeds = speeds
        self.clocks = [0.0] * len(speeds)
        self.running: list[dict[int, int]] = [{} for _ in speeds]
        self.waiting: list[list[int]] = [[] for _ in speeds]
        self.dealt: list[list[int]] = [[] for _ in speeds]
        self.ends = [0.0] * len(speeds)
        self._replies: dict[int, tuple[list[int], int]] = {}

    @property
    def busy(self) -> bool:
        return bool(self._replies)

    def send(self, engine: int, requests: list[int]) -> None:
        assert engine not in self._replies
        self.dealt[engine] += requests
        self.waiting[engine] += requests
        running, waiting, finished = self.running[engine], self.waiting[engine], []
        for _ in range(STEPS):
            # The cache holds ``cache`` tokens; what does not fit any more goes back to the front of the queue.
            while sum(running.values()) + len(running) > self.cache and len(running) > 1:
                waiting.insert(0, next(reversed(running)))
                del running[waiting[0]]
            while waiting and len(running) < self.slots and sum(running.values()) + 1 < self.cache:
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
        self._replies[engine] = (finished, len(waiting))

    def receive(self, from_all: bool) -> list[tuple[int, tuple[list[int], int]]]:
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


def simulate(
    lengths: Sequence[int],
    num_engines: int,
    slots: int,
    deterministic: bool,
    cache: int = 1 << 60,
    speeds: Sequence[float] | None = None,
) -> SimulatedEngines:
    """Serve requests of so many tokens; checks that each is finished once."""
    engines = SimulatedEngines(lengths, slots, cache, speeds or [1.0] * num_engines)
    finished: list[int] = []

    def take(reply: tuple[list[int], int]) -> tuple[int, int]:
        finished.extend(reply[0])
        return len(reply[0]), reply[1]

    surely = max(1, cache // max(lengths))
    queue = RequestQueue(len(lengths), [EngineRoom(slots, surely)] * num_engines)
    serve(queue, engines, lambda rows: (list(rows),), take, deterministic)
    assert sorted(finished) == list(range(len(lengths)))
    assert queue.held == [0] * num_engines and queue.left == 0
    return engines


def skewed(count: int, seed: int, alike: float = 0.0) -> list[int]:
    """Log-normal lengths around 300 whose longest is some ten times the median.

    ``alike``: the share of their variance that is common to the 8 responses to one prompt.
    """
    draw = random.Random(seed)
    # The largest of N draws is some quantile 1 - 1 / 2N.
    sigma = math.log(10) / NormalDist().inv_cdf(1 - 1 / (2 * count))
    prompts = [draw.gauss(0, alike**0.5) for _ in range(count // 8)]
    z = [prompts[i // 8] + draw.gauss(0, (1 - alike) ** 0.5) for i in range(count)]
    return [max(1, round(300 * math.exp(sigma * each))) for each in z]


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize(("num_engines", "slots"), [(4, 64), (64, 16)])
def test_engines_end_together_unless_one_response_outlasts_them_all(num_engines: int, slots: int, deterministic: bool):
    """The least that any order can take is the longest response, or all tokens over all slots."""
    for per_slot in (1, 64):
        lengths = skewed(per_slot * slots * num_engines, seed=per_slot)
        assert 7 < max(lengths) / 300 < 14
        ideal = max(max(lengths), sum(lengths) / (slots * num_engines))
        assert simulate(lengths, num_engines, slots, deterministic).makespan < 1.1 * ideal


def fixed_shares(lengths: Sequence[int], num_engines: int, slots: int) -> float:
    """The makespan where each engine gets an equal number of requests at once."""
    size, ends = len(lengths), []
    for engine in range(num_engines):
        free = [0] * slots
        for length in lengths[size * engine // num_engines : size * (engine + 1) // num_engines]:
            heapq.heappush(free, heapq.heappop(free) + length)
        ends.append(max(free))
    return max(ends)


def test_no_engine_waits_for_one_that_was_dealt_long_responses():
    """Responses to one prompt are alike in length, so a share of few prompts may be long."""
    dealt = fixed = 0.0
    for seed in range(2):
        lengths = skewed(8 * 64 * 16, seed, alike=0.7)
        dealt += simulate(lengths, 64, 16, deterministic=True).makespan
        fixed += fixed_shares(lengths, 64, 16)
    assert dealt < 0.95 * fixed


def test_who_gets_what_depends_on_lengths_alone():
    lengths = skewed(2000, seed=0)
    alike, unlike = (simulate(lengths, 4, 16, True, speeds=speeds) for speeds in ([1.0] * 4, [1.0, 0.5, 2.0, 0.7]))
    assert alike.dealt == unlike.dealt
    # Where it may depend on time, the faster engine does more.
    free = simulate(lengths, 4, 16, False, speeds=[1.0, 0.5, 2.0, 0.7])
    shares = [len(dealt) for dealt in free.dealt]
    assert shares[2] > shares[0] > shares[3] > shares[1] and free.makespan < unlike.makespan


def test_what_fits_is_dealt_at_once_in_the_order_of_the_prompts():
    queue = RequestQueue(10, [EngineRoom(4, 9)] * 3)
    assert queue.first() == [range(0, 3), range(3, 6), range(6, 10)] and queue.left == 0
    queue = RequestQueue(2, [EngineRoom(4, 9)] * 3)
    assert [len(share) for share in queue.first()] == [0, 1, 1]


def test_an_engine_whose_cache_is_full_gets_nothing_more():
    queue = RequestQueue(100, [EngineRoom(32, 8), EngineRoom(32, 8)])
    assert queue.first() == [range(0, 8), range(8, 16)]
    # Nothing waits: there is room for half as many again. One waits although a slot is free: the cache is full.
    queue.finish(0, 0, 0)
    queue.finish(1, 4, 1)
    assert queue.take(0) == range(16, 21) and queue.take(1) == range(21, 21)
    queue.finish(1, 3, 0)
    assert queue.take(1) == range(21, 33)


def test_work_is_taken_ahead_while_much_is_left():
    queue = RequestQueue(46, [EngineRoom(8, 99), EngineRoom(8, 99)])
    # 30 are left beside the slots: a quarter of them for each.
    assert queue.first() == [range(0, 15), range(15, 30)]
    queue.finish(0, 8, 0)
    assert queue.take(0) == range(30, 35)
    queue.finish(1, 12, 0)
    assert queue.take(1) == range(35, 42) and queue.left == 4


def test_a_small_cache_is_used_and_not_flooded():
    lengths = skewed(3000, seed=1)
    cache = 20 * 400
    engines = simulate(lengths, 4, 64, True, cache=cache)
    # Each token is held while later ones of its response are decoded.
    ideal = sum(length * length / 2 for length in lengths) / (4 * cache)
    assert engines.makespan < 2.5 * ideal
