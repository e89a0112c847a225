"""Queue that assigns requests to engines as room becomes available.

This module avoids heavy imports. Assignments depend only on the numbers of requests, so they are reproducible.
"""

from collections.abc import Sequence
from typing import NamedTuple


class EngineCapacity(NamedTuple):
    """Number of responses that an engine can decode at once."""

    slots: int
    """Maximum number of responses."""
    guaranteed: int
    """Number of responses that fit in the engine's cache even at maximum length."""
    version: int = 0
    """Version number of the engine's weights, as set by the trainer."""


class RequestQueue:
    """Queue that assigns requests 0 to ``num_requests`` - 1 to engines in ascending order.

    If all requests fit, they are divided equally among the engines at the start. Otherwise, each of several engines
    starts with the number guaranteed to fit in its cache. The other requests wait for room, so no engine has long
    responses left while others are idle. Consecutive requests go to the same engine if possible, because requests with
    the same prompt share cache space. If there is only one engine, it fills all its slots at the start.
    """

    def __init__(self, num_requests: int, engines: Sequence[EngineCapacity]) -> None:
        self.num_requests = num_requests
        self.held = [0] * len(engines)
        """Number of unfinished requests on each engine."""
        self.dealt: list[list[int]] = [[] for _ in engines]
        """All requests ever assigned to each engine."""
        self._engine_of: dict[int, int] = {}
        self._resumed: list[list[int]] = [[] for _ in engines]
        """Requests that each engine will resume because its cache contains their conversations."""
        self._again: list[int] = []
        """Requests that any engine may process, such as those of lost engines."""
        self._slots = [engine.slots for engine in engines]
        several = len(engines) > 1
        self._room = [min(engine.slots, engine.guaranteed) if several else engine.slots for engine in engines]
        self._full = [False] * len(engines)
        self._next = 0

    @property
    def left(self) -> int:
        """Number of requests that have not been assigned to an engine."""
        return self.num_requests - self._next + len(self._again)

    def first(self) -> list[Sequence[int]]:
        size, num_engines = self.num_requests, len(self.held)
        bounds = [size * engine // num_engines for engine in range(num_engines + 1)]
        equal = [stop - start for start, stop in zip(bounds, bounds[1:], strict=False)]
        left = size - sum(map(min, equal, self._room))
        return [
            self._deal(engine, min(share, self._room[engine] + self._ahead(engine, left)))
            for engine, share in enumerate(equal)
        ]

    def take(self, engine: int) -> Sequence[int]:
        """Return the requests to send to ``engine`` now, or none if it has no room or no requests are left."""
        resumed, self._resumed[engine] = self._resumed[engine], []
        self.held[engine] += len(resumed)
        room = self._room[engine] + self._ahead(engine, self.left) - self.held[engine]
        dealt = self._deal(engine, 0 if self._full[engine] else min(max(0, room), self.left))
        return [*resumed, *dealt] if resumed else dealt

    def resume(self, requests: Sequence[int]) -> None:
        """Queue each request for the engine that last processed it, or for any engine if that one is unavailable."""
        for request in requests:
            engine = self._engine_of.get(request)
            if engine is not None and self._slots[engine]:
                self._resumed[engine].append(request)
            else:
                self._again.append(request)

    def finish(self, engine: int, num_finished: int, num_waiting: int) -> None:
        """Record how many requests ``engine`` has finished and how many of its remaining requests are waiting."""
        self.held[engine] -= num_finished
        # The cache is full if requests are waiting even though it had free slots before the latest ones finished.
        num_running = self.held[engine] - num_waiting
        self._full[engine] = num_waiting > 0 and num_running + num_finished < self._slots[engine]
        if not self._full[engine]:
            # Responses may turn out shorter than the guaranteed capacity assumes.
            self._room[engine] = min(self._slots[engine], self._room[engine] + self._room[engine] // 2 + 1)

    def lose(self, engine: int, unfinished: Sequence[int]) -> None:
        """Record that ``engine`` is lost, and queue its ``unfinished`` requests for other engines."""
        self._again += unfinished
        self._resumed[engine] = []
        self.held[engine] = self._room[engine] = self._slots[engine] = 0

    def _ahead(self, engine: int, left: int) -> int:
        """Return the number of extra requests that keep all slots of ``engine`` busy until its next reply.

        The number decreases with the number of remaining requests, because another engine may have room sooner.
        """
        slots = self._slots[engine]
        return min(slots, left // (2 * len(self.held))) if self._room[engine] == slots else 0

    def _deal(self, engine: int, count: int) -> Sequence[int]:
        again, self._again = self._again[:count], self._again[count:]
        new = range(self._next, self._next + count - len(again))
        self._next += len(new)
        self.held[engine] += count
        dealt: Sequence[int] = [*again, *new] if again else new
        self.dealt[engine] += dealt
        self._engine_of |= dict.fromkeys(dealt, engine)
        return dealt
