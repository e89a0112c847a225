"""RoRecomp (arXiv 2509.25958): short correct and long incorrect responses first, the others later from a buffer.

The abstract gives the idea; the rest is assumed. In each group the correct responses up to the median length of the
correct ones, and the incorrect responses from the median of the incorrect ones on, form the priority batch. The others
wait in the buffer, and every ``period`` steps those of the oldest groups are learned from besides (the compensation
batch). Advantages are estimated in whole groups in both.
"""

import torch
from torch import Tensor

from verl.data.replay import Responses, StepBatch


class ShortFirst:
    """Recomposes the batch; the buffer holds whole groups, of which the responses left out are to be learned from."""

    def __init__(self, period: int = 4) -> None:
        self.period = period

    def recompose(self, batch: StepBatch) -> Responses:
        """The priority batch, and in every ``period``-th step the compensation batch behind it."""
        fresh, buffer = batch.responses, batch.buffer
        first = priority(fresh.correct, fresh.lengths, fresh.group_ids) & fresh.learned
        parts = [fresh.learning(first)]
        if batch.step % self.period == 0 and len(buffer):
            parts.append(buffer.take(self._oldest(buffer.responses, batch.max_learned - int(first.sum()), len(fresh))))
        buffer.add(fresh.learning(fresh.learned & ~first))
        return Responses.join(parts)

    def _oldest(self, held: Responses, room: int, most: int) -> Tensor:
        """[N] int64, places of the oldest groups, of ``most`` responses with ``room`` of them to learn from."""
        ids, index = held.group_ids.unique(return_inverse=True)
        learned = torch.zeros(len(ids), dtype=torch.int64).index_add(0, index, held.learned.long()).cumsum(0)
        sizes = torch.zeros(len(ids), dtype=torch.int64).index_add(0, index, torch.ones_like(index)).cumsum(0)
        return ((learned <= room) & (sizes <= most))[index].nonzero().flatten()


def priority(correct: Tensor, lengths: Tensor, group_ids: Tensor) -> Tensor:
    """[B] bool: ``correct`` [B] bool and not longer than the median of its group's correct ``lengths`` [B], or else
    incorrect and not shorter than that of the incorrect ones. Of two in the middle, the one that keeps fewer counts."""
    chosen = torch.zeros_like(correct)
    for group in group_ids.unique():
        for kind, sign in ((correct, 1), (~correct, -1)):
            rows = ((group_ids == group) & kind).nonzero().flatten()
            if len(rows):
                signed = sign * lengths[rows]
                chosen[rows] = signed <= signed.median()
    return chosen
