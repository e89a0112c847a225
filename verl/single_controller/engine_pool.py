"""Pool of rollout engines on separate devices, in which lost engines are replaced."""

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
    """Processes being started to replace a lost engine."""

    hosts: list[Any]
    calls: list[Any]
    """Pending calls to these processes."""
    identities: list[Identity] | None
    """Identities of all workers, including replacements, or None until the new processes are prepared."""


class EnginePool(WorkerGroup):
    """Worker group in which each engine forms a separate world, so that other engines can continue if one is lost.

    Args:
        arguments, options: Arguments of :class:`WorkerGroup`; each engine consists of ``workers_per_world`` workers.
        goes_on: Whether to continue without a lost engine, and to use its replacement once that has started.
        say: Callback that shows a line of text; it may be called from any thread.
    """

    options = "rollout"

    def __init__(self, *arguments: Any, goes_on: bool, say: Callable[[str], None], **options: Any) -> None:
        self._goes_on, self._say = goes_on, say
        self.background = ThreadPoolExecutor(1, "sampling")
        """Thread that runs sampling calls while the trainer works. It is shut down with the engines."""
        self._restarts: dict[int, _Restart] = {}
        """Engine restarts in progress, keyed by the first rank of the engine."""
        self._replacing = threading.Lock()
        self._closed = False
        super().__init__(*arguments, **options)

    def run_living(self, method: str, *arguments: Any) -> list[Any]:
        """Like :meth:`WorkerGroup.run`, but return results only from workers that survive the call."""
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
        """Continue without the lost worker's engine, and return the worker's rank.

        Raises ``error`` if no engine would remain, the rank is unknown, the pool is closed, or ``goes_on`` is False.
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
        """Add replacement engines that are ready, start missing ones, and return whether an engine was added.

        The call never blocks. Added engines do not have weights yet.
        """
        size, before = self._workers_per_world, len(self.living)
        with self._replacing:
            lost = set() if self._closed else {self._world_of(rank).start for rank in self._supervisor.left_out}
            for first in lost:
                restart = self._restarts.pop(first, None)
                if restart is None:
                    hosts = [self._new_process(rank) for rank in self._world_of(first)]
                    calls = [self._prepare(first + i, host) for i, host in enumerate(hosts)]
                    self._restarts[first] = _Restart(hosts, calls, None)
                elif ray.wait(restart.calls, num_returns=size, timeout=0)[1]:
                    self._restarts[first] = restart
                else:
                    # If the replacement failed to start, the next call tries again.
                    with suppress(RayError):
                        self._next_stage(first, restart)
        return len(self.living) > before

    def _next_stage(self, first: int, restart: _Restart) -> None:
        """Start workers in prepared processes, or add an engine to the pool if its workers have started."""
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
        with self._replacing:
            # The sampling thread may be about to start new engines.
            self._closed = True
            for restart in self._restarts.values():
                for host in restart.hosts:
                    ray.kill(host)
        try:
            super().close()
        finally:
            # This does not block: closing the group makes any call that the thread is waiting for raise.
            self.background.shutdown()
