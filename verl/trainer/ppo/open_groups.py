"""Tracks the groups of responses that ``async_training.partial_rollout`` carries over between steps.

A response of an admitted group is open until its generation finishes, and ready afterwards. A group is complete once
all its responses are ready. Each step trains on the oldest complete groups. Groups are never dropped.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from verl.batch import EPISODE, Batch
from verl.batch.state import batch_from_state, batch_state, restored_record, saved_record
from verl.data.prompt_record import PromptRecord
from verl.rollout.environments.conversations import DRIVER_COLUMNS, new_conversations, to_rows
from verl.rollout.requests import response_stream

ADMITTED = 1 << 31
"""Offset added to a group's number to compute its seed, so that a repeated prompt yields new responses."""


@dataclass(eq=False)
class OpenGroups:
    """Groups that have been admitted but not trained on yet."""

    n: int
    """Number of responses per group."""
    batch_size: int
    """Number of groups per step."""
    carried_steps: int
    """Maximum number of steps from a group's admission to the step that trains on it."""
    open: Batch | None = None
    """Partial responses."""
    ready: Batch | None = None
    """Finished responses with their verdicts."""
    waiting: Sequence[PromptRecord] = ()
    """Prompts that have been read from the data but not admitted yet."""
    num_admitted: int = 0
    """Number of groups admitted so far."""

    def admit(self, records: Sequence[PromptRecord], step: int, seed: int, conversing: bool) -> None:
        """Admit one group per prompt. ``seed`` is the run's seed, and ``conversing`` is set for multi-turn rollouts."""
        prompts = [record for record in records for _ in range(self.n)]
        groups = self.num_admitted + torch.arange(len(records)).repeat_interleave(self.n)
        seeds = ((seed << 32) + ADMITTED + groups).tolist()
        streams = [response_stream(seeds[i], record.uid, i % self.n) for i, record in enumerate(prompts)]
        self.num_admitted += len(records)
        batch = Batch.of(
            [record.input_ids for record in prompts],
            [[] for _ in prompts],
            rollout_logprobs=torch.zeros(0),
            version=torch.zeros(0, dtype=torch.int32),
            records=prompts,
            group=groups,
            step=torch.full((len(prompts),), step),
        )
        if conversing:
            batch.merge(to_rows(new_conversations(prompts)).columns("source", *DRIVER_COLUMNS))
        # Reinterpret the unsigned 64-bit integers as signed ones.
        batch.fill(EPISODE, stream=torch.tensor([s - (s >> 63 << 64) for s in streams]))
        self.open = append(self.open, batch)

    def outstanding(self) -> dict[int, int]:
        """Return a mapping from each outstanding group to its admission step, oldest first."""
        pairs = {
            number: step
            for part in (self.open, self.ready)
            if part is not None
            for number, step in zip(part.group.tolist(), part.step.tolist(), strict=True)
        }
        return dict(sorted(pairs.items()))

    def complete(self) -> list[int]:
        """Return the complete groups, oldest first."""
        ready, still_open = (set() if part is None else set(part.group.tolist()) for part in (self.ready, self.open))
        return sorted(ready - still_open)

    def take(self, groups: Sequence[int]) -> Batch | None:
        """Remove the complete ``groups`` and return them, oldest first, or return None if ``groups`` is empty."""
        if not groups:
            return None
        assert self.ready is not None
        taken = torch.isin(self.ready.group, torch.tensor(groups))
        rows = taken.nonzero().flatten()
        batch = self.ready[rows[self.ready.group[rows].argsort(stable=True)]]
        self.ready = None if taken.all() else self.ready[~taken]
        return batch

    def needed(self) -> int:
        """Return how many groups must be complete before the engines may stop.

        Unless a batch is already complete, at least a quarter of a batch is completed to limit repeated prefills.
        """
        ready = len(self.complete())
        return max(self.batch_size, ready + self.batch_size // 4 if ready < self.batch_size else 0)

    def suffice(self, step: int, admitted: dict[int, int], needed: int, groups: Tensor, ended: Sequence[int]) -> bool:
        """Return whether enough groups are complete and the remaining groups can still meet their deadlines.

        A group is due ``carried_steps`` steps after admission. At most j batches may be due within the next j steps.

        Args:
            admitted: Admission step of each outstanding group.
            needed: Number of complete groups that the step needs.
            groups: Group of each response that is being generated, [B].
            ended: Indices of the finished responses.
        """
        left = Counter(groups.tolist())
        left.subtract(groups[list(ended)].tolist())
        complete = [group for group in admitted if not left[group]]
        if len(complete) < needed:
            return False
        # With filter_groups, some of these groups may still be filtered out in this step or a later one.
        taken = set(complete[: self.batch_size])
        due = Counter(admitted[group] + self.carried_steps - step for group in admitted if group not in taken)
        return all(
            sum(count for steps, count in due.items() if steps <= j) <= j * self.batch_size
            for j in range(self.carried_steps)
        )

    def state(self, prompts: Sequence[PromptRecord]) -> dict[str, Any]:
        """Return the groups' state as JSON values and tensors. ``prompts`` is the training data, indexed by ``uid``."""
        parts = {"open": self.open, "ready": self.ready}
        saved = {name: batch_state(part, prompts) for name, part in parts.items() if part is not None}
        waiting = [saved_record(record, prompts) for record in self.waiting]
        return {"num_admitted": self.num_admitted, "waiting": waiting} | saved

    def load_state(self, state: dict[str, Any], prompts: Sequence[PromptRecord]) -> None:
        self.num_admitted = state["num_admitted"]
        self.waiting = [restored_record(saved, prompts) for saved in state["waiting"]]
        self.open, self.ready = (
            batch_from_state(state[name], prompts) if name in state else None for name in ("open", "ready")
        )


def append(batch: Batch | None, part: Batch) -> Batch:
    """Return ``batch`` followed by ``part``."""
    return part if batch is None else Batch.join([batch, part])
