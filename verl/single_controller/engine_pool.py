"""Engines with devices of their own: one may be lost, and another takes its place."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError

from verl.cluster.failures import MachineError
from verl.single_controller.supervision import Identity
from verl.single_controller.worker_group import WorkerGroup


class _Restart(NamedTuple):
    """New processes in the place of a lost engine's."""

    hosts: list[Any]
    calls: list[Any]
    """The calls that they are busy with."""
    identities: list[Identity] | None
    """Of all workers with theirs among them, once they have been prepared."""


class EnginePool(WorkerGroup):
    """A group whose workers form a world for each engine, so that the others can do without one.

    Args:
        arguments, options: of :class:`WorkerGroup`; ``workers_per_world`` form an engine.
        goes_on: without an engine that was lost, and with a new one in its place as soon as that has started.
        say: shows a line; from another thread than the driver's first.
    """

    options = "rollout"

    def __init__(self, *arguments: Any, goes_on: bool, say: Callable[[str], None], **options: Any) -> None:
        self._goes_on, self._say = goes_on, say
        self.background = ThreadPoolExecutor(1, "sampling")
        """The thread that has the engines sample beside the trainer; it ends with them."""
        self._restarts: dict[int, _Restart] = {}
        """By the engine's first rank."""
        self._replacing = threading.Lock()
        self._closed = False
        super().__init__(*arguments, **options)

    def run_living(self, method: str, *arguments: Any) -> list[Any]:
        """Call as :meth:`WorkerGroup.run`; return the results of workers that are not lost by its end."""
        ranks = {self.call(rank, method, arguments): rank for rank in self.living}
        replies: dict[Any, Any] = {}
        started = time.monotonic()
        while pending := {call: rank for call, rank in ranks.items() if call not in replies and rank in self.living}:
            try:
                for call, reply in self.completed(pending, method, started):
                    replies[call] = reply
            except MachineError as error:
                self.leave_out(error)
        return [self.received(replies[call]) for call, rank in ranks.items() if rank in self.living]

    def leave_out(self, error: MachineError) -> int:
        """Continue without the engine of the lost worker; return the worker's rank.

        Raises ``error`` if it was the last engine, or the run is to end.
        """
        rank = error.rank
        if rank is None or not self._goes_on or self._closed or len(self.living) == self._workers_per_world:
            raise error
        ranks = self._world_of(rank)
        self.living = [living for living in self.living if living not in ranks]
        self._supervisor.left_out |= set(ranks)
        for each in ranks:
            ray.kill(self._workers[each])
        self._say(f"{error}; going on with {len(self.living) // self._workers_per_world} engines")
        return rank

    def replace_lost(self) -> bool:
        """Take in engines that have started to replace lost ones, and start others; return whether there are new ones.

        New engines have no weights yet. Waits for nothing.
        """
        with self._replacing:
            return not self._closed and self._replace_lost()

    def _replace_lost(self) -> bool:
        size, before = self._workers_per_world, len(self.living)
        for first in {self._world_of(rank).start for rank in self._supervisor.left_out}:
            restart = self._restarts.pop(first, None)
            if restart is None:
                hosts = [self._new_process(rank) for rank in self._world_of(first)]
                calls = [self._prepare(first + i, host) for i, host in enumerate(hosts)]
                self._restarts[first] = _Restart(hosts, calls, None)
            elif ray.wait(restart.calls, num_returns=size, timeout=0)[1]:
                self._restarts[first] = restart
            else:
                # One that could not start is tried again.
                with suppress(RayError):
                    self._next_stage(first, restart)
        return len(self.living) > before

    def _next_stage(self, first: int, restart: _Restart) -> None:
        """From prepared processes to workers, and from workers to an engine of the pool."""
        results, ranks = ray.get(restart.calls), self._world_of(first)
        if restart.identities is None:
            identities = self._supervisor.identities.copy()
            identities[ranks.start : ranks.stop] = results
            calls = [self._start(rank, host, identities) for rank, host in zip(ranks, restart.hosts, strict=True)]
            self._restarts[first] = _Restart(restart.hosts, calls, identities)
            return
        self._workers[ranks.start : ranks.stop] = restart.hosts
        self._supervisor.identities[ranks.start : ranks.stop] = restart.identities[ranks.start : ranks.stop]
        self._supervisor.left_out -= set(ranks)
        self.living = sorted([*self.living, *ranks])
        self._say(f"{self._supervisor.name(first)} takes the place of one that was lost")

    def _world_of(self, rank: int) -> range:
        first = rank - rank % self._workers_per_world
        return range(first, first + self._workers_per_world)

    def close(self) -> None:
        """Stop the workers."""
        with self._replacing:
            # The thread that has the engines sample may be about to start new ones.
            self._closed = True
            for restart in self._restarts.values():
                for host in restart.hosts:
                    ray.kill(host)
        try:
            super().close()
        finally:
            # What it waits for raises now.
            self.background.shutdown()
