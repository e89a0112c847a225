"""Driver-side handles that split batches over workers, for each role of a worker group, such as policy or critic.

Legend: B = number of episodes.
"""

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from verl.batch import Batch
from verl.config.ppo import PPOConfig
from verl.config.rollout import SamplingConfig
from verl.data.prompt_record import PromptRecord
from verl.models.micro_batches import rows_by_teacher, rows_by_value
from verl.models.packing import prompt_index
from verl.rollout.agents.sessions import Sessions
from verl.rollout.environments.conversations import Conversations, ConversationSetup
from verl.rollout.requests import ResponseRequests
from verl.single_controller.generation import Generation, generate_responses
from verl.single_controller.worker_group import WorkerGroup


def balanced_order(lengths: Tensor, num_shares: int) -> Tensor:
    """Order samples so that contiguous shares, as in ``WorkerGroup.run_split``, have similar numbers of tokens.

    Samples are assigned from longest to shortest (longest processing time first). Each goes to the share with the
    fewest tokens among those with room. Within a share, samples are sorted from longest to shortest.

    Args:
        lengths: Number of tokens of each sample, [B] integers.
        num_shares: Number of shares, whose sizes differ by at most one sample.

    Returns:
        A permutation of the samples, [B] int64.
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
    """Distribute groups evenly over shares, padding each group to the same size with copies of its shortest sample.

    Args:
        group_ids: Group of each sample, [B] integers. Samples of a group stay together.
        lengths: Number of tokens of each sample, [B] integers.
        balance: Whether to give every share a similar number of tokens.

    Returns:
        Three tensors [B'] in share order: sample indices, whether each is a copy (bool), and the index of its group
        in this order, 0, 0, ..., 1, 1, ...
    """
    groups = rows_by_value(group_ids)
    tokens = lengths.tolist()
    size = max(map(len, groups))
    shortest = [min(group, key=lambda row: tokens[row]) for group in groups]
    rows = [[*group, *[short] * (size - len(group))] for group, short in zip(groups, shortest, strict=True)]
    copied = [[False] * len(group) + [True] * (size - len(group)) for group in groups]
    for _ in range(-len(groups) % num_shares):
        # Every share needs the same number of groups, so fill up with groups made of the shortest row overall.
        rows.append([min(shortest, key=lambda row: tokens[row])] * size)
        copied.append([True] * size)
    totals = torch.tensor([sum(tokens[row] for row in group) for group in rows])
    order = balanced_order(totals, num_shares) if balance else torch.arange(len(rows))
    unit = torch.arange(len(rows)).repeat_interleave(size)
    return torch.tensor(rows)[order].flatten(), torch.tensor(copied)[order].flatten(), unit


def dealt_by_teacher(batch: Batch, num_shares: int, deal: Callable[[Batch], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """Deal the rows of each teacher separately, so that all shares have equally many rows of each, in one order.

    Args:
        batch: Episodes. Without the column ``teacher``, all rows have the same teacher.
        deal: Function that returns row indices in the order of equally large shares, and other tensors [B'] like it.

    Returns:
        The tensors that ``deal`` returns, for the whole batch.
    """
    if "teacher" not in batch:
        return deal(batch)
    parts = []
    for _, rows in rows_by_teacher(batch):
        order, *others = deal(batch[rows])
        parts.append((rows[order], *others))
    columns = ([part.view(num_shares, -1) for part in column] for column in zip(*parts, strict=True))
    return tuple(torch.cat(column, dim=1).flatten() for column in columns)


@dataclass(eq=False)
class ModelWorkers:
    """Handle for one role of a worker group, such as policy or critic."""

    workers: WorkerGroup
    ranks_per_share: int = 1
    """Number of consecutive workers that process a share together. See :meth:`WorkerGroup.run_split`."""
    balance: bool = False
    """Whether to balance the number of tokens per worker, not only the number of samples."""
    whole_prompts: bool = False
    """Whether balancing keeps responses to the same prompt together if the prompts divide evenly into shares."""

    def map_rows(self, method: str, batch: Batch) -> Batch:
        """Call ``method`` on shares of ``batch``, and return the resulting episodes in the order of ``batch``.

        Workers gather parameters together and must run the same number of forward passes. All shares are therefore
        padded to the same size with copies of the shortest sample. The results of these copies are discarded.
        """
        order, _ = self._shares(batch)
        results = self.workers.run_split(method, batch[order], ranks_per_share=self.ranks_per_share)
        return Batch.join(results)[inverse(order)]

    def run_update(self, method: str, batch: Batch, *arguments: Any) -> dict[str, float]:
        """Call ``method`` on shares of ``batch``, assigned to workers in any order, and return the metrics.

        All workers report the same metrics. Shares are padded as in :meth:`map_rows`, with copies masked in the loss.
        """
        rows, _ = self._to_learn(batch)
        metrics: dict[str, float] = self.workers.run_split(
            method, rows, *arguments, ranks_per_share=self.ranks_per_share
        )[0]
        return metrics

    def run_scoring_update(self, method: str, batch: Batch, *arguments: Any) -> tuple[dict[str, float], Batch]:
        """Like :meth:`run_update`, but also return the episodes from ``method``, in the order of ``batch``."""
        rows, order = self._to_learn(batch)
        results = self.workers.run_split(method, rows, *arguments, ranks_per_share=self.ranks_per_share)
        return results[0][0], Batch.join([scored for _, scored in results])[inverse(order)]

    def _to_learn(self, batch: Batch) -> tuple[Batch, Tensor]:
        """Return the samples in the order of the shares, with copies masked in the loss, and their indices."""
        order, copied = self._shares(batch)
        return _unlearned(batch[order], copied), order

    @property
    def _num_shares(self) -> int:
        return self.workers.world_size // self.ranks_per_share

    def _shares(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the indices of samples in the order of the shares, and a bool mask that marks copies.

        The shortest sample is repeated until all shares have the same size, also those of each teacher's samples.
        """
        order, copied = dealt_by_teacher(batch, self._num_shares, self._deal)
        return order, copied

    def _deal(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return what :meth:`_shares` returns, without regard to teachers."""
        lengths = batch.lengths
        rows = torch.cat([torch.arange(len(batch)), lengths.argmin().repeat(-len(batch) % self._num_shares)])
        order = torch.arange(len(rows))
        if self.balance:
            units = self._dealt_together(batch, rows)
            order = units[balanced_order(lengths[rows][units].sum(dim=1), self._num_shares)].flatten()
        return rows[order], order >= len(batch)

    def _dealt_together(self, batch: Batch, rows: Tensor) -> Tensor:
        """Return indices into ``rows``, [U, n], grouped by prompt if prompts split evenly, or ungrouped with n = 1."""
        if self.whole_prompts:
            groups = rows_by_value(prompt_index(batch)[rows])
            if len({*map(len, groups)}) == 1 and len(groups) % self._num_shares == 0:
                return torch.tensor(groups)
        return torch.arange(len(rows))[:, None]


def inverse(order: Tensor) -> Tensor:
    """Return the last position of each index in ``order``."""
    places = torch.empty(int(order.max()) + 1, dtype=torch.int64)
    places[order] = torch.arange(len(order))
    return places


def _unlearned(batch: Batch, copied: Tensor) -> Batch:
    """Clear ``learn_mask`` in the samples selected by the bool mask ``copied [B]``."""
    return batch.fill(learn_mask=batch.learn_mask & ~copied.repeat_interleave(batch.response_lengths))


class PolicyWorkers(ModelWorkers):
    """Policy workers, which also contain the rollout engines.

    Args:
        whole_groups: Whether the policy loss needs all responses to a prompt in one micro-batch.
        conversations: Setup of multi-turn conversations, or None if each response has a single turn.
    """

    def __init__(
        self,
        workers: WorkerGroup,
        config: PPOConfig,
        whole_groups: bool = False,
        conversations: ConversationSetup | None = None,
    ) -> None:
        ranks_per_share, balance = config.model.ulysses_sequence_parallel_size, config.actor.use_dynamic_bsz
        super().__init__(workers, ranks_per_share, balance, config.model.shares_prompts)
        self.config = config
        self.whole_groups = whole_groups
        self.conversations = conversations
        self.engines: WorkerGroup = workers
        """Workers of the rollout engines."""
        self.newest_version = 0
        """Version of the policy's weights."""

    def _to_learn(self, batch: Batch) -> tuple[Batch, Tensor]:
        """Like the base method, but keep groups together if the loss requires it, and set ``group`` to -1 in copies."""
        if not self.whole_groups:
            return super()._to_learn(batch)

        def deal(rows: Batch) -> tuple[Tensor, Tensor, Tensor]:
            return deal_groups(rows.group, rows.lengths, self._num_shares, self.balance)

        # The units of different teachers may have equal ids, because they are never in one micro-batch.
        order, copied, unit = dealt_by_teacher(batch, self._num_shares, deal)
        rows = _unlearned(batch[order], copied)
        return rows.fill(group=rows.group.masked_fill(copied, -1), unit=unit), order

    def generate(
        self,
        records: Sequence[PromptRecord],
        sampling: SamplingConfig,
        seed: int,
        on_finished: Callable[[Batch], None] = lambda part: None,
        settings: Mapping[str, Any] | None = None,
        max_response_length: int | None = None,
    ) -> Batch:
        """Sample responses with the engines and their current weights. See :func:`generate_responses`.

        See :class:`ResponseRequests` for ``max_response_length``.
        """
        if max_response_length is not None:
            settings = {**(settings or {}), "max_response_length": max_response_length}
        self._load_engines()
        return generate_responses(
            self.engines,
            self.config.rollout.tensor_parallel_size,
            records,
            sampling,
            seed,
            max_response_length or self.config.data.max_response_length,
            deterministic=self._deterministic,
            on_finished=on_finished,
            settings=settings,
            conversations=self.conversations,
            version=self._version,
        )

    def generation(
        self,
        requests: ResponseRequests,
        on_finished: Callable[[Batch], None],
        enough: Callable[[Sequence[int]], bool],
        conversations: Conversations | Sessions | None = None,
    ) -> Generation:
        """Prepare to sample ``requests`` with the current weights. Call ``run`` on the result to start sampling."""
        self._load_engines()
        engines = (self.engines, self.config.rollout.tensor_parallel_size, requests, self._deterministic)
        return Generation(*engines, on_finished, enough, conversations, version=self._version)

    @property
    def _version(self) -> int:
        """Version of the weights with which to sample."""
        return self.newest_version

    def _load_engines(self) -> None:
        """Load the weights with which to sample. Engines in the policy's workers have them since ``sync_weights``."""

    @property
    def _deterministic(self) -> bool:
        return self.config.trainer.deals_by_counts(self.engines.device_type)

    def finish_generation(self) -> None:
        """Free the memory of engines that share workers with the models, until they generate or receive weights."""
        self.workers.run("finish_generation")

    def compute_logprobs(self, batch: Batch) -> Batch:
        """Return the episodes with ``logprobs``, ``entropy`` and the statistics needed by the estimator and the loss.

        With ``calculator.source=actor``, rank metrics are included.
        """
        return self.map_rows("compute_logprobs", batch.columns("tokens", "source"))

    def sync_weights(self, version: int) -> None:
        """Send the policy's weights to the engines, which report ``version`` when they start to generate."""
        self.newest_version = version
        self.workers.run("sync_weights", version)
