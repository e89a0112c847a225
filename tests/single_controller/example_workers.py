"""Workers that need no model: processes of a group import this module by its name."""

import time
from typing import Any

import torch

from verl.protocol import ConversationBatch
from verl.utils.distributed import WorkerPlace

EXHAUSTED = {
    "GPU": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nSee the docs."),
    "Python": MemoryError(),
    "torch on a CPU": RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."),
    "something else": RuntimeError("shapes differ"),
}


class ExampleWorker:
    """Holds nothing but its rank."""

    def __init__(self, config: Any, place: WorkerPlace) -> None:
        self.rank = place.rank

    def first_tokens(self, batch: ConversationBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """The first token of each row [B], and this worker's rank [B]."""
        return batch.input_ids[:, 0], torch.full((len(batch),), self.rank)

    def count_tokens(self, batch: ConversationBatch, factor: int) -> dict[str, float]:
        """Tokens of the share."""
        self.share = batch
        return {"tokens": float(batch.attention_mask.sum() * factor), "rank": float(self.rank)}

    def learned(self) -> tuple[int, list[int]]:
        """Rows of the last share that was counted, and the first tokens of those that have something to learn."""
        return len(self.share), self.share.input_ids[self.share.loss_mask.any(dim=1), 0].tolist()

    def hold(self, mebibytes_by_rank: list[int]) -> int:
        """Use so much memory for a moment; returns the rank."""
        torch.ones(mebibytes_by_rank[self.rank] << 20, dtype=torch.uint8)
        return self.rank

    def update_actor(self, exhausted: str) -> None:
        """Run out of memory on the last of four workers."""
        if self.rank == 3:
            raise EXHAUSTED[exhausted]

    def multiply(self) -> None:
        torch.ones(8, 8) @ torch.ones(8, 8)


class FailingWorker:
    """The last of two workers cannot be made; the first waits for it."""

    def __init__(self, config: Any, place: WorkerPlace) -> None:
        if place.rank == 1:
            raise config or RuntimeError("no model here")
        time.sleep(600)
