"""Small worlds of real processes joined by gloo, without Ray."""

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


class World:
    """Processes that run functions together, one rank each."""

    def __init__(self, ranks: list[ProcessPoolExecutor]) -> None:
        self._ranks = ranks

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call a function of an importable module on all ranks at once; its results in rank order."""
        futures = [rank.submit(function, *arguments) for rank in self._ranks]
        return [future.result() for future in futures]


@contextmanager
def world(size: int, folder: Path) -> Iterator[World]:
    """A world of ``size`` processes that share an interpreter with everything imported; ``folder`` must be empty."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.models.sharding_cases"])
    ranks = [
        ProcessPoolExecutor(1, mp_context=context, initializer=_join, initargs=(rank, size, folder / "store"))
        for rank in range(size)
    ]
    try:
        yield World(ranks)
    finally:
        for rank in ranks:
            rank.shutdown()


def _join(rank: int, size: int, store: Path) -> None:
    torch.set_num_threads(1)
    # A rank that fails leaves the others waiting for it.
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )
