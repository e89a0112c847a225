"""RoRecomp (arXiv 2509.25958): short correct and long incorrect responses first, the others later from a buffer.

The abstract gives the idea; the rest is assumed. In each group the correct responses up to the median length of the
correct ones, and the incorrect responses from the median of the incorrect ones on, form the priority batch. The others
wait in the buffer, and every ``period`` steps those of the oldest groups are learned from besides (the compensation
batch). Advantages are estimated in whole groups in both.
"""

from typing import Any

import torch
from torch import Tensor

from verl.batch import Batch
from verl.method import Method, ReplayBuffer


class ShortFirst(Method):
    """Recomposes the batch; the buffer holds whole groups, of which the responses left out are to be learned from."""

    def __init__(self, period: int = 4, buffer_size: int = 4096) -> None:
        """``buffer_size``: responses that the buffer holds at most."""
        self.period = period
        self.buffer = ReplayBuffer(buffer_size, self.prompts)

    def learn_from(self, batch: Batch) -> Batch:
        """Return the priority batch, followed in every ``period``-th step by the compensation batch."""
        first = priority(batch.correct, batch.response_lengths, batch.group) & batch.learned
        parts = [with_learned(batch, first)]
        if self.step % self.period == 0 and len(self.buffer):
            room = self.max_learned - int(first.sum())
            parts.append(self.buffer.take(oldest_groups(self.buffer.batch, room, len(batch))))
        self.buffer.add(with_learned(batch, batch.learned & ~first))
        return Batch.join(parts)

    def state_dict(self) -> dict[str, Any]:
        """Return the buffer."""
        return {"buffer": self.buffer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore it."""
        self.buffer.load_state_dict(state["buffer"])


def with_learned(batch: Batch, learned: Tensor) -> Batch:
    """Return the same responses, of which those of ``learned`` [B] bool are learned from."""
    return batch.columns(*batch.names).fill(learned=learned)


def oldest_groups(held: Batch, room: int, most: int) -> Tensor:
    """[N] int64, places of the oldest groups, of ``most`` responses with ``room`` of them to learn from."""
    ids, index = held.group.unique(return_inverse=True)
    learned = torch.zeros(len(ids), dtype=torch.int64).index_add(0, index, held.learned.long()).cumsum(0)
    sizes = torch.zeros(len(ids), dtype=torch.int64).index_add(0, index, torch.ones_like(index)).cumsum(0)
    return ((learned <= room) & (sizes <= most))[index].nonzero().flatten()


def priority(correct: Tensor, lengths: Tensor, group_ids: Tensor) -> Tensor:
    """Return the responses of the priority batch, [B] bool.

    Those are the ``correct`` [B] bool ones no longer than the median of their group's correct ``lengths`` [B], and the
    incorrect ones no shorter than that of its incorrect ones. Of two in the middle, the one that keeps fewer counts.
    """
    chosen = torch.zeros_like(correct)
    for group in group_ids.unique():
        for kind, sign in ((correct, 1), (~correct, -1)):
            rows = ((group_ids == group) & kind).nonzero().flatten()
            if len(rows):
                signed = sign * lengths[rows]
                chosen[rows] = signed <= signed.median()
    return chosen
