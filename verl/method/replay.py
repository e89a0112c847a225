"""Replay buffer for :meth:`verl.method.Method.learn_from`."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from verl.batch import Batch
from verl.batch.state import batch_from_state, batch_state
from verl.data.prompt_record import PromptRecord


class ReplayBuffer:
    """Buffer of at most ``capacity`` responses. Drops the oldest groups first and uses about 20 bytes per token.

    Include the buffer's ``state_dict()`` in the method's ``state_dict``.
    """

    def __init__(self, capacity: int, prompts: Sequence[PromptRecord]) -> None:
        """Create an empty buffer. ``prompts``, the training data (``Method.prompts``), is not saved with the buffer."""
        if capacity < 1:
            raise ValueError(f"capacity={capacity}: must be at least 1")
        self.capacity = capacity
        self.prompts = prompts
        self._held: Batch | None = None

    def __len__(self) -> int:
        return 0 if self._held is None else len(self._held)

    @property
    def batch(self) -> Batch:
        """Responses in the buffer, oldest first. Raises ``ValueError`` if the buffer is empty."""
        if self._held is None:
            raise ValueError("the buffer is empty; check its len() first")
        return self._held

    def add(self, batch: Batch) -> None:
        """Append responses without the additional values that custom reward functions returned."""
        verdicts = [replace(verdict, extras={}) for verdict in batch.verdicts]
        added = batch.columns(*batch.names).fill(verdicts=verdicts)
        held = added if self._held is None else Batch.join([self._held, added])
        first = max(0, len(held) - self.capacity)
        # Never drop only part of a group.
        while 0 < first < len(held) and held.group[first] == held.group[first - 1]:
            first += 1
        self._hold(held[first:])

    def take(self, rows: Tensor | Sequence[int]) -> Batch:
        """Remove the responses at the indices ``rows`` from the buffer and return them."""
        taken = self.batch[rows]
        index = torch.as_tensor(rows)
        left = torch.ones(len(self), dtype=torch.bool)
        left[index if index.dtype == torch.bool else index.long()] = False
        self._hold(self.batch[left])
        return taken

    def _hold(self, held: Batch) -> None:
        self._held = held if len(held) else None

    def state_dict(self) -> dict[str, Any]:
        """Return the buffered responses as tensors and JSON values."""
        return {} if self._held is None else batch_state(self._held, self.prompts)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore saved responses. Raises ``ConfigError`` if the training data has changed since they were saved."""
        self._held = batch_from_state(state, self.prompts) if state else None
