"""A worker that says what it was given."""

from typing import Any

import torch

from verl.protocol import ConversationBatch
from verl.utils.distributed import WorkerPlace


class EchoWorker:
    """Holds nothing but its rank."""

    def __init__(self, config: Any, place: WorkerPlace) -> None:
        self.rank = place.rank

    def first_tokens(self, batch: ConversationBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """The first token of each row [B], and this worker's rank [B]."""
        return batch.input_ids[:, 0], torch.full((len(batch),), self.rank)

    def count_tokens(self, batch: ConversationBatch, factor: int) -> dict[str, float]:
        """Tokens of the share."""
        return {"tokens": float(batch.attention_mask.sum() * factor), "rank": float(self.rank)}
