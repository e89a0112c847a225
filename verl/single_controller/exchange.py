"""Calls of engines, each at its own pace."""

import time
from typing import Any

from verl.single_controller.worker_group import WorkerGroup


class Exchange:
    """Messages to the engines of a worker group and their replies; an engine has at most one message at a time.

    A message is a call of ``method`` on the workers of an engine.

    Args:
        copies: neighbouring workers that form one engine. All get the same message; the first one's reply counts.
    """

    def __init__(self, workers: WorkerGroup, method: str, copies: int) -> None:
        self.workers = workers
        self.method = method
        self.copies = copies
        self._calls: dict[int, list[Any]] = {}
        self._results: dict[Any, Any] = {}
        self._started = time.monotonic()

    @property
    def num_engines(self) -> int:
        """Engines of the group."""
        return self.workers.world_size // self.copies

    @property
    def busy(self) -> bool:
        """Whether a reply is to come."""
        return bool(self._calls)

    def send(self, engine: int, *arguments: Any) -> None:
        """Give ``engine``, which must be idle, a message."""
        assert engine not in self._calls, f"engine {engine} is busy"
        ranks = range(engine * self.copies, (engine + 1) * self.copies)
        self._calls[engine] = [self.workers.call(rank, self.method, arguments) for rank in ranks]

    def receive(self, from_all: bool) -> list[tuple[int, Any]]:
        """The engines that have replied, in their order, with their replies: one at least, or all that are busy.

        Raises:
            WorkerError: a worker raised or died.
        """
        ranks = {
            call: engine * self.copies + copy
            for engine, calls in self._calls.items()
            for copy, call in enumerate(calls)
            if call not in self._results
        }
        for call, result in self.workers.completed(ranks, self.method, self._started):
            self._results[call] = result
            if not from_all and self._has_replied(ranks[call] // self.copies):
                break
        return [(engine, self._reply(engine)) for engine in sorted(self._calls) if self._has_replied(engine)]

    def _has_replied(self, engine: int) -> bool:
        return all(call in self._results for call in self._calls[engine])

    def _reply(self, engine: int) -> Any:
        first, *_ = [self.workers.received(self._results.pop(call)) for call in self._calls.pop(engine)]
        return first
