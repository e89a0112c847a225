"""Simulated engines for the queue and the loop of generation: each decodes a token of every response in a step."""

import heapq
import math
import random
from collections.abc import Sequence
from statistics import NormalDist

from verl.rollout.queue import EngineRoom, RequestQueue
from verl.single_controller.generation import STEPS_PER_CALL, serve


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
        for _ in range(STEPS_PER_CALL):
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


def fixed_shares(lengths: Sequence[int], num_engines: int, slots: int) -> float:
    """The makespan where each engine gets an equal number of requests at once."""
    size, ends = len(lengths), []
    for engine in range(num_engines):
        free = [0] * slots
        for length in lengths[size * engine // num_engines : size * (engine + 1) // num_engines]:
            heapq.heappush(free, heapq.heappop(free) + length)
        ends.append(max(free))
    return max(ends)


def ideal(lengths: Sequence[int], num_engines: int, slots: int) -> float:
    """Steps that no order can go below: the longest response, or all tokens spread over all slots."""
    return max(max(lengths), sum(lengths) / (num_engines * slots))
