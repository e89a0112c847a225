"""Handles of the models that a group of workers holds: one per role, which knows how its batches are shared out.

Legend: B episodes.
"""

import heapq
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from verl.batch import Batch
from verl.config.ppo import PPOConfig
from verl.config.rollout import SamplingConfig
from verl.data.prompt_rows import PromptRecord
from verl.models.micro_batches import rows_by_value
from verl.models.packing import prompt_index
from verl.rollout.environments.conversations import Conversations, ConversationSetup
from verl.rollout.requests import ResponseRequests
from verl.single_controller.engine_pool import EnginePool
from verl.single_controller.generation import Generation, generate_responses
from verl.single_controller.worker_group import Stored, WorkerGroup


def balanced_order(lengths: Tensor, num_shares: int) -> Tensor:
    """Order rows so that the contiguous shares of ``WorkerGroup.run_split`` have about equal tokens.

    The longest rows are dealt out first, each to the share with the fewest tokens that still has room (longest
    processing time first). Within a share rows go from long to short.

    Args:
        lengths: [B] integers, tokens of each row.
        num_shares: shares, which differ by at most one row.

    Returns:
        [B] int64, a permutation of the rows.
    """
    size = len(lengths)
    bounds = [size * share // num_shares for share in range(num_shares + 1)]
    members: list[list[int]] = [[] for _ in range(num_shares)]
    open_shares = [(0, share) for share in range(num_shares) if bounds[share] < bounds[share + 1]]
    tokens = lengths.tolist()
    for row in sorted(range(size), key=lambda row: -tokens[row]):
        total, share = heapq.heappop(open_shares)
        members[share].append(row)
        if len(members[share]) < bounds[share + 1] - bounds[share]:
            heapq.heappush(open_shares, (total + tokens[row], share))
    return torch.tensor([row for rows in members for row in rows], dtype=torch.int64)


def deal_groups(group_ids: Tensor, lengths: Tensor, num_shares: int, balance: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Deal whole groups to shares, as many to each, filled up to one size with copies of the shortest rows.

    Args:
        group_ids: [B] integers, equal on rows that stay together.
        lengths: [B] integers, tokens of each row.
        balance: give every share about as many tokens.

    Returns:
        Tensors [B'] in the order in which shares are cut: rows, each once and then copies; bool, the copies; and the
        number of the group, 0, 0, ..., 1, 1, ...
    """
    groups = rows_by_value(group_ids)
    tokens = lengths.tolist()
    size = max(map(len, groups))
    shortest = [min(group, key=lambda row: tokens[row]) for group in groups]
    rows = [[*group, *[short] * (size - len(group))] for group, short in zip(groups, shortest, strict=True)]
    copied = [[False] * len(group) + [True] * (size - len(group)) for group in groups]
    for _ in range(-len(groups) % num_shares):
        # A share needs as many groups as the others; one row, the shortest of all, stands for each of this one's.
        rows.append([min(shortest, key=lambda row: tokens[row])] * size)
        copied.append([True] * size)
    totals = torch.tensor([sum(tokens[row] for row in group) for group in rows])
    order = balanced_order(totals, num_shares) if balance else torch.arange(len(rows))
    unit = torch.arange(len(rows)).repeat_interleave(size)
    return torch.tensor(rows)[order].flatten(), torch.tensor(copied)[order].flatten(), unit


class ModelWorkers:
    """The workers of a group in one of their roles.

    Args:
        copies: neighbouring workers that work on one share together, see :meth:`WorkerGroup.run_split`.
        balance: give every worker about as many tokens, not only as many rows.
        whole_prompts: to do so deal prompts with all their responses, where every worker gets as many.
    """

    def __init__(
        self, workers: WorkerGroup, copies: int = 1, balance: bool = False, whole_prompts: bool = False
    ) -> None:
        self.workers = workers
        self.copies = copies
        self.balance = balance
        self.whole_prompts = whole_prompts

    def map_rows(self, method: str, batch: Batch) -> Batch:
        """Call ``method`` on shares of ``batch``; returns the episodes that the workers return, in its order.

        Workers gather parameters together and must do equally many forward passes, so shares are filled up to one size
        with copies of the shortest row; their results are dropped.
        """
        order, _ = self._shares(batch)
        results = self.workers.run_split(method, batch[order], copies=self.copies)
        return Batch.join(results)[inverse(order)]

    def run_update(self, method: str, batch: Batch, *arguments: Any) -> dict[str, float]:
        """Call ``method`` on shares of ``batch``, whose rows may go to any worker; returns the first worker's metrics.

        All workers report the same. Shares are filled up as in :meth:`map_rows`, with nothing to learn from the copies.
        """
        rows, _ = self._to_learn(batch)
        metrics: dict[str, float] = self.workers.run_split(method, rows, *arguments, copies=self.copies)[0]
        return metrics

    def run_scoring_update(self, method: str, batch: Batch, *arguments: Any) -> tuple[dict[str, float], Batch]:
        """Do :meth:`run_update` with a method that also returns episodes; return them in the order of ``batch``."""
        rows, order = self._to_learn(batch)
        results = self.workers.run_split(method, rows, *arguments, copies=self.copies)
        return results[0][0], Batch.join([scored for _, scored in results])[inverse(order)]

    def _to_learn(self, batch: Batch) -> tuple[Batch, Tensor]:
        """Return the rows as they are cut into shares, and their order."""
        order, copied = self._shares(batch)
        return _unlearned(batch[order], copied), order

    @property
    def _num_shares(self) -> int:
        return self.workers.world_size // self.copies

    def _shares(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the order in which rows are cut into shares, and which of them are copies, bool.

        The shortest row is repeated until all shares are equal.
        """
        lengths = batch.lengths
        rows = torch.cat([torch.arange(len(batch)), lengths.argmin().repeat(-len(batch) % self._num_shares)])
        order = torch.arange(len(rows))
        if self.balance:
            units = self._dealt_together(batch, rows)
            order = units[balanced_order(lengths[rows][units].sum(dim=1), self._num_shares)].flatten()
        return rows[order], order >= len(batch)

    def _dealt_together(self, batch: Batch, rows: Tensor) -> Tensor:
        """Return [U, n], places in ``rows``: whole prompts if shares get equally many of one size, else single rows."""
        if self.whole_prompts:
            groups = rows_by_value(prompt_index(batch)[rows])
            if len({*map(len, groups)}) == 1 and len(groups) % self._num_shares == 0:
                return torch.tensor(groups)
        return torch.arange(len(rows))[:, None]


def inverse(order: Tensor) -> Tensor:
    """Return the last place of each row in ``order``."""
    places = torch.empty(int(order.max()) + 1, dtype=torch.int64)
    places[order] = torch.arange(len(order))
    return places


def _unlearned(batch: Batch, copied: Tensor) -> Batch:
    """Clear ``learn_mask`` on the rows ``copied [B]`` bool."""
    return batch.fill(learn_mask=batch.learn_mask & ~copied.repeat_interleave(batch.response_lengths))


class PolicyWorkers(ModelWorkers):
    """The policy, and the engines that sample from it, in its own workers or in a pool."""

    def __init__(
        self,
        workers: WorkerGroup,
        config: PPOConfig,
        whole_groups: bool = False,
        pool: EnginePool | None = None,
        conversations: ConversationSetup | None = None,
    ) -> None:
        """Hold the policy and its engines.

        Args:
            whole_groups: the policy loss needs all responses to a prompt in one micro-batch.
            pool: of class :class:`verl.workers.rollout.RolloutWorker`; None: the engines are in ``workers``.
            conversations: how responses have several turns; None: each has one.
        """
        copies, balance = config.model.ulysses_sequence_parallel_size, config.actor.use_dynamic_bsz
        super().__init__(workers, copies, balance, config.model.shares_prompts)
        self.config = config
        self.whole_groups = whole_groups
        self.pool = pool
        self.conversations = conversations
        self.engines: WorkerGroup = workers if pool is None else pool
        self._engine_size = config.rollout.tensor_parallel_size
        self._dtype = None if pool is None else pool.run("weight_dtype")[0]
        self._newest: Stored | None = None
        """The policy's weights, for a pool."""
        self._weights: Stored | None = None
        """Those that the pool samples with, and whether its engines have them."""
        self._pulled = self._held = False

    def _to_learn(self, batch: Batch) -> tuple[Batch, Tensor]:
        """Keep groups together if the loss needs that; the ``group`` of copies is then -1."""
        if not self.whole_groups:
            return super()._to_learn(batch)
        order, copied, unit = deal_groups(batch.group, batch.lengths, self._num_shares, self.balance)
        rows = _unlearned(batch[order], copied)
        return rows.fill(group=rows.group.masked_fill(copied, -1), unit=unit), order

    def generate(
        self,
        records: Sequence[PromptRecord],
        sampling: SamplingConfig,
        seed: int,
        on_finished: Callable[[Batch], None] = lambda part: None,
        settings: Mapping[str, Any] | None = None,
    ) -> Batch:
        """Have the engines sample with the newest weights; see :func:`generate_responses`."""
        self._pull_weights()
        longest, conversations = self.config.data.max_response_length, self.conversations
        options = (longest, self._deterministic, on_finished, settings, conversations)
        return generate_responses(self.engines, self._engine_size, records, sampling, seed, *options)

    def advance(
        self,
        requests: ResponseRequests,
        on_finished: Callable[[Batch], None],
        enough: Callable[[Sequence[int]], bool],
        conversations: Conversations | None = None,
    ) -> tuple[list[Batch], Batch | None]:
        """Have the engines work on ``requests`` with the newest weights; see :class:`Generation`."""
        self._pull_weights()
        options = (self._deterministic, on_finished, enough, conversations)
        return Generation(self.engines, self._engine_size, requests, *options).run()

    @property
    def _deterministic(self) -> bool:
        return self.config.trainer.deals_by_counts(self.engines.device_type)

    def finish_generation(self) -> None:
        """Free the engines' memory for the models in the same workers, until they generate or get new weights."""
        if self.pool is None:
            self.workers.run("finish_generation")

    def compute_logprobs(self, batch: Batch) -> Batch:
        """Return the same episodes with ``logprobs``, ``entropy`` and the statistics that estimator and loss need.

        With ``calculator.source=actor`` also with rank metrics.
        """
        return self.map_rows("compute_logprobs", batch.columns("tokens", "source"))

    def sync_weights(self) -> None:
        """Give the engines the policy's weights; those of a pool pull them when they generate next."""
        if self.pool is None:
            self.workers.run("sync_weights")
            return
        # Not two versions at a time, where nothing samples with the one before.
        self._newest = None
        if not self._held:
            self._weights = None
        self._newest = self.workers.run("publish_weights", self._dtype)[0]

    def hold_weights(self) -> None:
        """Have a pool sample with the newest weights of now until :meth:`release_weights`, even if others follow."""
        self._take_newest()
        self._held = True

    def release_weights(self) -> None:
        """Have the pool sample with the newest weights again."""
        self._held = False

    def _take_newest(self) -> None:
        if self._newest is None:
            self.sync_weights()
        if self._weights is not self._newest:
            self._weights, self._pulled = self._newest, False

    def _pull_weights(self) -> None:
        """Let the engines of a pool have the weights that they are to sample with."""
        if self.pool is None:
            return
        if not self._held:
            self._take_newest()
        if self.pool.replace_lost() or not self._pulled:
            self.pool.run_living("load_weights", self._weights)
            self._pulled = True
