"""RoRecomp (arXiv 2509.25958): learn from short correct and long incorrect responses first, and from others later.

Only the abstract was available, so the details are assumed. From each group, the priority batch contains the correct
responses that are no longer than their median and the incorrect responses that are no shorter than theirs. The other
responses are buffered. Every ``period`` steps, the oldest buffered groups are added to the batch as a compensation
batch. Advantages always use whole groups.
"""

import torch
from torch import Tensor

from verl.batch import Batch
from verl.method import ReplayBuffer
from verl.recipes.common import Saving


class ShortFirst(Saving):
    """Method that recomposes batches. Its buffer holds whole groups, with ``learned`` set for unused responses."""

    saved = ("buffer",)

    def __init__(self, period: int = 4, buffer_size: int = 4096) -> None:
        """Configure the period in steps and ``buffer_size``, the maximum number of buffered responses."""
        self.period = period
        self.buffer = ReplayBuffer(buffer_size, self.prompts)

    def learn_from(self, batch: Batch) -> Batch:
        """Return the priority batch, followed by the compensation batch in every ``period``-th step."""
        first = priority(batch.correct, batch.response_lengths, batch.group) & batch.learned
        parts = [with_learned(batch, first)]
        if self.step % self.period == 0 and len(self.buffer):
            room = self.max_learned - int(first.sum())
            parts.append(self.buffer.take(oldest_groups(self.buffer.batch, room, len(batch))))
        self.buffer.add(with_learned(batch, batch.learned & ~first))
        return Batch.join(parts)


def with_learned(batch: Batch, learned: Tensor) -> Batch:
    """Return ``batch`` with the values of the column ``learned`` replaced, [B] bool."""
    return batch.columns(*batch.names).fill(learned=learned)


def oldest_groups(held: Batch, room: int, most: int) -> Tensor:
    """Return indices of the oldest groups' responses: at most ``most``, and at most ``room`` with ``learned`` set."""
    ids, index = held.group.unique(return_inverse=True)
    learned = torch.zeros(len(ids), dtype=torch.int64).index_add(0, index, held.learned.long()).cumsum(0)
    sizes = torch.zeros(len(ids), dtype=torch.int64).index_add(0, index, torch.ones_like(index)).cumsum(0)
    return ((learned <= room) & (sizes <= most))[index].nonzero().flatten()


def priority(correct: Tensor, lengths: Tensor, group_ids: Tensor) -> Tensor:
    """Return a mask of the priority batch, [B] bool, given ``correct`` [B] bool and ``lengths`` [B].

    For an even number of responses, the median is whichever of the two middle lengths selects fewer responses.
    """
    chosen = torch.zeros_like(correct)
    for group in group_ids.unique():
        for kind, sign in ((correct, 1), (~correct, -1)):
            rows = ((group_ids == group) & kind).nonzero().flatten()
            if len(rows):
                signed = sign * lengths[rows]
                chosen[rows] = signed <= signed.median()
    return chosen
