"""Which engine samples which request: one queue, from which engines take work while they have room.

Imports nothing heavy, and decides by counts alone: given the same replies in the same order, it deals the same.
"""

from collections.abc import Sequence
from typing import NamedTuple


class EngineCapacity(NamedTuple):
    """How much an engine can decode at once."""

    slots: int
    """Most responses."""
    guaranteed: int
    """Responses for which its cache has room however long they become."""


class RequestQueue:
    """Requests 0 to ``num_requests`` - 1, dealt to engines in this order.

    If all fit, each engine gets an equal share at once. Otherwise each of several begins with what it is guaranteed
    and the rest waits here until one has room, so that none is stuck with a share of long responses while others idle.
    Neighbours go to the same engine where its room allows: requests of one prompt share its place in the cache. A
    single engine begins with all its slots: no other could take what waits, and it knows best what its cache holds.
    """

    def __init__(self, num_requests: int, engines: Sequence[EngineCapacity]) -> None:
        self.num_requests = num_requests
        self.held = [0] * len(engines)
        """Unfinished requests of each engine."""
        self.dealt: list[list[int]] = [[] for _ in engines]
        """Requests that each engine was ever given."""
        self._engine_of: dict[int, int] = {}
        self._resumed: list[list[int]] = [[] for _ in engines]
        """Conversations that go on, by the engine whose cache holds them."""
        self._again: list[int] = []
        """Requests of engines that were lost."""
        self._slots = [engine.slots for engine in engines]
        self._room = [min(engine) if len(engines) > 1 else engine.slots for engine in engines]
        self._full = [False] * len(engines)
        self._next = 0

    @property
    def left(self) -> int:
        """Requests that no engine has yet."""
        return self.num_requests - self._next + len(self._again)

    def first(self) -> list[Sequence[int]]:
        """Return the first requests of each engine."""
        size, num_engines = self.num_requests, len(self.held)
        bounds = [size * engine // num_engines for engine in range(num_engines + 1)]
        equal = [stop - start for start, stop in zip(bounds, bounds[1:], strict=False)]
        left = size - sum(map(min, equal, self._room))
        return [
            self._deal(engine, min(share, self._room[engine] + self._ahead(engine, left)))
            for engine, share in enumerate(equal)
        ]

    def take(self, engine: int) -> Sequence[int]:
        """Return the requests that ``engine`` gets now; none if it has no room, or none are left."""
        resumed, self._resumed[engine] = self._resumed[engine], []
        self.held[engine] += len(resumed)
        room = self._room[engine] + self._ahead(engine, self.left) - self.held[engine]
        dealt = self._deal(engine, 0 if self._full[engine] else min(max(0, room), self.left))
        return [*resumed, *dealt] if resumed else dealt

    def resume(self, requests: Sequence[int]) -> None:
        """Queue these requests again, each for the engine that had it last."""
        for request in requests:
            engine = self._engine_of[request]
            (self._resumed[engine] if self._slots[engine] else self._again).append(request)

    def finish(self, engine: int, num_finished: int, num_waiting: int) -> None:
        """Note how many requests ``engine`` has finished, and how many of the others it has not begun."""
        self.held[engine] -= num_finished
        # Its cache is full if requests wait although there are slots, besides those that became free just now.
        num_running = self.held[engine] - num_waiting
        self._full[engine] = num_waiting > 0 and num_running + num_finished < self._slots[engine]
        if not self._full[engine]:
            # Responses may turn out shorter than the cache allows for.
            self._room[engine] = min(self._slots[engine], self._room[engine] + self._room[engine] // 2 + 1)

    def lose(self, engine: int, unfinished: Sequence[int]) -> None:
        """Note that ``engine`` is lost; the others get its ``unfinished`` requests."""
        self._again += unfinished
        self._resumed[engine] = []
        self.held[engine] = self._room[engine] = self._slots[engine] = 0

    def _ahead(self, engine: int, left: int) -> int:
        """Return how many requests ``engine`` may hold ahead, so that no slot idles until its next reply.

        The fewer are left, the fewer it takes: another engine may have room for them sooner.
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
