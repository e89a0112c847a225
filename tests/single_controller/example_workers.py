"""Workers that need no model: processes of a group import this module by its name."""

import os
import time
from pathlib import Path
from typing import Any

import ray
import torch

from verl.batch import Batch
from verl.utils.distributed import WorkerPlace, join_world


class Actor:
    """A part of a worker."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def update(self) -> None:
        """Run out of memory on the last of four workers."""
        if self.rank == 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nSee the docs.")


class ExampleWorker:
    """Holds nothing but its rank."""

    def __init__(self, config: Any, place: WorkerPlace) -> None:
        self.rank, self.actor = place.rank, Actor(place.rank)

    def note_rank(self, batch: Batch) -> Batch:
        """The same rows with the first token of each [B], and this worker's rank [B]."""
        first = batch.padded("response_tokens")[:, 0]
        return batch.columns().fill("episode", first_token=first, rank=torch.full((len(batch),), self.rank))

    def count_tokens(self, batch: Batch, factor: int) -> dict[str, float]:
        """Tokens of the share."""
        self.share = batch
        return {"tokens": float(len(batch.tokens) * factor), "rank": float(self.rank)}

    def count_and_return_tokens(self, batch: Batch, factor: int) -> tuple[dict[str, float], Batch]:
        """Tokens of the share, and all of them."""
        return self.count_tokens(batch, factor), batch.columns("tokens")

    def learned(self) -> tuple[int, list[int]]:
        """Rows of the last share that was counted, and the first tokens of those that have something to learn."""
        learned = self.share.padded("learn_mask").any(dim=1)
        return len(self.share), self.share.padded("response_tokens")[learned, 0].tolist()

    def hold(self, mebibytes_by_rank: list[int]) -> int:
        """Use so much memory for a moment; returns the rank."""
        torch.ones(mebibytes_by_rank[self.rank] << 20, dtype=torch.uint8)
        return self.rank

    def take_as_long(self, seconds: float) -> int:
        """Returns the rank."""
        time.sleep(seconds)
        return self.rank

    def save(self, folder: Path) -> None:
        """Begin to write a checkpoint."""

    def finish_save(self) -> None:
        """Worker 1 finds the disk full; its error does not say where."""
        if self.rank == 1:
            with open("/dev/full", "wb") as file:
                file.write(b"1")

    def surroundings(self, *names: str) -> tuple[dict[str, str], dict[str, str]]:
        """Some variables as this process has them, and as Ray has written them down."""
        shown = ray.get_runtime_context().runtime_env["env_vars"]
        return {name: os.environ[name] for name in names}, {name: shown[name] for name in names if name in shown}


class MeetingWorker:
    """Meets the others, and says what it was told of the network and how it creates files."""

    def __init__(self, config: Any, place: WorkerPlace) -> None:
        join_world(place)
        torch.distributed.barrier()

    def umask(self) -> int:
        os.umask(mask := os.umask(0))
        return mask


class FailingWorker:
    """The last of two workers cannot be made; the first waits for it."""

    def __init__(self, config: Any, place: WorkerPlace) -> None:
        if place.rank == 1:
            raise config or RuntimeError("no model here")
        time.sleep(600)


class HangingWorker:
    """Sleeps, fails or dies on request."""

    def __init__(self, config: Any, place: WorkerPlace) -> None:
        self.rank, self.place = place.rank, place

    def process(self) -> int:
        return os.getpid()

    def rest(self, seconds: float) -> None:
        print(f"resting for {seconds} s", flush=True)
        time.sleep(seconds)

    def fail(self, error: Exception) -> None:
        if self.rank == 1:
            raise error

    def meet(self) -> None:
        """Worker 1 does not come."""
        join_world(self.place)
        if self.rank == 0:
            torch.distributed.barrier()
        time.sleep(60)

    def exit_or_fail(self, error: Exception) -> None:
        """Worker 0 dies a moment after worker 1 has said that its connection broke."""
        if self.rank == 1:
            raise error
        time.sleep(1)
        os._exit(1)
