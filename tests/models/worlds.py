"""Small worlds of real processes joined by gloo, without Ray and without a rollout engine."""

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

from verl.cluster.network import free_port
from verl.utils.distributed import WorkerPlace, join_world


class World:
    """Processes that run functions together, one rank each."""

    def __init__(self, ranks: list[ProcessPoolExecutor]) -> None:
        self._ranks = ranks

    def run(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> list[Any]:
        """Call a function of an importable module on all ranks at once; its results in rank order."""
        futures = [rank.submit(function, *arguments, **options) for rank in self._ranks]
        return [future.result() for future in futures]


@contextmanager
def world(size: int) -> Iterator[World]:
    """A world of ``size`` processes, forks of one that has imported what tests run, which takes seconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.models.sharding_cases", "tests.models.models_in_worlds"])
    port = free_port()
    with ExitStack() as stack:
        places = [WorkerPlace(rank, size, "127.0.0.1", port, "cpu", 1) for rank in range(size)]
        yield World(
            [
                stack.enter_context(ProcessPoolExecutor(1, mp_context=context, initializer=_join, initargs=(place,)))
                for place in places
            ]
        )


def _join(place: WorkerPlace) -> None:
    join_world(place)
