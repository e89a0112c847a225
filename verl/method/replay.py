"""Responses of earlier steps, for :meth:`verl.method.Method.learn_from`."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from verl.batch import Batch
from verl.batch.state import batch_from_state, batch_state
from verl.data.prompt_rows import PromptRecord


class ReplayBuffer:
    """At most ``capacity`` responses, in about 20 bytes a token; the oldest groups fall out.

    A method that has one puts its ``state_dict()`` into its own.
    """

    def __init__(self, capacity: int, prompts: Sequence[PromptRecord]) -> None:
        """``prompts``: the training data (``Method.prompts``), which is not saved again."""
        if capacity < 1:
            raise ValueError(f"capacity={capacity}: must be at least 1")
        self.capacity = capacity
        self.prompts = prompts
        self._held: Batch | None = None

    def __len__(self) -> int:
        return 0 if self._held is None else len(self._held)

    @property
    def batch(self) -> Batch:
        """The responses held, the oldest first. Raises ``ValueError`` while the buffer is empty."""
        if self._held is None:
            raise ValueError("the buffer is empty; ask for its len() first")
        return self._held

    def add(self, batch: Batch) -> None:
        """Hold these too. What a user's reward function returned besides the score is not kept."""
        verdicts = [replace(verdict, extras={}) for verdict in batch.verdicts]
        added = batch.columns(*batch.names).fill(verdicts=verdicts)
        held = added if self._held is None else Batch.join([self._held, added])
        first = max(0, len(held) - self.capacity)
        # A group falls out as a whole.
        while 0 < first < len(held) and held.group[first] == held.group[first - 1]:
            first += 1
        self._hold(held[first:])

    def take(self, rows: Tensor | Sequence[int]) -> Batch:
        """Remove and return these rows of ``batch``."""
        taken = self.batch[rows]
        index = torch.as_tensor(rows)
        left = torch.ones(len(self), dtype=torch.bool)
        left[index if index.dtype == torch.bool else index.long()] = False
        self._hold(self.batch[left])
        return taken

    def _hold(self, held: Batch) -> None:
        self._held = held if len(held) else None

    def state_dict(self) -> dict[str, Any]:
        """Return the responses held, as tensors and JSON values."""
        return {} if self._held is None else batch_state(self._held, self.prompts)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Hold what :meth:`state_dict` returned. Raises ``ConfigError`` if the training data is other data."""
        self._held = batch_from_state(state, self.prompts) if state else None
