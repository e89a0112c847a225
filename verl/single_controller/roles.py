"""Typed handles of the models that a group of workers holds: one per role, which knows how its batches are shared out.

Legend: B episodes, M response tokens.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from verl.batch import Batch
from verl.config.ppo import PPOConfig
from verl.config.rollout import SamplingConfig
from verl.config.sft import SFTConfig
from verl.data.prompt_rows import PromptRecord
from verl.rollout.requests import ResponseSettings
from verl.single_controller.balance import balanced_order, deal_groups
from verl.single_controller.generation import generate_responses
from verl.single_controller.worker_group import WorkerGroup


class RoleWorkers:
    """The workers of a group in one of their roles.

    Args:
        copies: neighbouring workers that work on one share together, see :meth:`WorkerGroup.run_split`.
        balance: give every worker about as many tokens, not only as many rows.
    """

    def __init__(self, workers: WorkerGroup, copies: int = 1, balance: bool = False) -> None:
        self.workers = workers
        self.copies = copies
        self.balance = balance

    def map_rows(self, method: str, batch: Batch) -> Batch:
        """Call ``method`` on shares of ``batch``; returns the episodes that the workers return, in its order.

        Workers gather parameters together and must do equally many forward passes, so shares are filled up to one size
        with copies of the shortest row; their results are dropped.
        """
        order, _ = self._shares(batch)
        results = self.workers.run_split(method, batch[order], copies=self.copies)
        return Batch.join(results)[_places(order)]

    def run_update(self, method: str, batch: Batch, *arguments: Any) -> dict[str, float]:
        """Call ``method`` on shares of ``batch``, whose rows may go to any worker; returns the first worker's metrics.

        All workers report the same. Shares are filled up as in :meth:`map_rows`, with nothing to learn from the copies.
        """
        rows, _ = self._to_learn(batch)
        metrics: dict[str, float] = self.workers.run_split(method, rows, *arguments, copies=self.copies)[0]
        return metrics

    def run_scoring_update(self, method: str, batch: Batch, *arguments: Any) -> tuple[dict[str, float], Batch]:
        """As :meth:`run_update` with a method that returns metrics and the episodes of its share, which come back in
        the order of ``batch``."""
        rows, order = self._to_learn(batch)
        results = self.workers.run_split(method, rows, *arguments, copies=self.copies)
        return results[0][0], Batch.join([scored for _, scored in results])[_places(order)]

    def _to_learn(self, batch: Batch) -> tuple[Batch, Tensor]:
        """The rows as they are cut into shares, and the order they are in."""
        order, copied = self._shares(batch)
        return _unlearned(batch[order], copied), order

    @property
    def _num_shares(self) -> int:
        return self.workers.world_size // self.copies

    def _shares(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The rows in the order in which they are cut into shares, the shortest as often as it takes to make these
        equal, and, for each of them, whether it is such a copy."""
        lengths = batch.lengths
        rows = torch.cat([torch.arange(len(batch)), lengths.argmin().repeat(-len(batch) % self._num_shares)])
        order = balanced_order(lengths[rows], self._num_shares) if self.balance else torch.arange(len(rows))
        return rows[order], order >= len(batch)


def _places(order: Tensor) -> Tensor:
    """Where each row is in ``order``."""
    places = torch.empty(int(order.max()) + 1, dtype=torch.int64)
    places[order] = torch.arange(len(order))
    return places


def _unlearned(batch: Batch, copied: Tensor) -> Batch:
    """``batch`` with nothing to learn from the rows ``copied [B]`` bool."""
    return batch.fill(learn_mask=batch.learn_mask & ~copied.repeat_interleave(batch.response_lengths))


class PolicyWorkers(RoleWorkers):
    """The policy, and the engines that sample from it."""

    def __init__(self, workers: WorkerGroup, config: PPOConfig, whole_groups: bool = False) -> None:
        """``whole_groups``: the policy loss needs all responses to a prompt in one micro-batch."""
        super().__init__(workers, config.model.ulysses_sequence_parallel_size, config.actor.use_dynamic_bsz)
        self.config = config
        self.whole_groups = whole_groups

    def _to_learn(self, batch: Batch) -> tuple[Batch, Tensor]:
        """With ``whole_groups`` each stays together, and copies are in none: their ``group`` is -1."""
        if not self.whole_groups:
            return super()._to_learn(batch)
        units = deal_groups(batch.group, batch.lengths, self._num_shares, self.balance)
        rows = _unlearned(batch[units.rows], units.copied)
        return rows.fill(group=rows.group.masked_fill(units.copied, -1), unit=units.unit), units.rows

    def generate(
        self,
        records: Sequence[PromptRecord],
        n: int,
        sampling: SamplingConfig,
        seed: int,
        on_finished: Callable[[Batch], None] = lambda part: None,
        settings: ResponseSettings | None = None,
    ) -> Batch:
        """See :func:`verl.single_controller.generation.generate_responses`."""
        return generate_responses(
            self.workers,
            self.config.rollout.tensor_parallel_size,
            records,
            n,
            sampling,
            seed,
            self.config.data.max_response_length,
            self.config.trainer.deals_by_counts(self.workers.device_type),
            on_finished,
            settings,
        )

    def finish_generation(self) -> None:
        """Free the engines' memory until they generate again or get new weights."""
        self.workers.run("finish_generation")

    def compute_logprobs(self, batch: Batch) -> Batch:
        """The same episodes with ``logprobs``, ``entropy``, the statistics that an estimator or a loss asks for, and
        ``rank_metrics``, which have no names without ``calculator.source=actor``."""
        return self.map_rows("compute_logprobs", batch.columns("tokens"))

    def update(self, batch: Batch, num_tokens: int, num_sequences: int) -> dict[str, float]:
        """One optimizer step on a mini-batch; the counts are those of its ``learn_mask``.

        See :meth:`verl.workers.actor.Actor.update` for its columns.
        """
        return self.run_update("update_actor", batch, num_tokens, num_sequences)

    def update_on_policy(self, batch: Batch, num_tokens: int, num_sequences: int) -> tuple[dict[str, float], Batch]:
        """As :meth:`update`, and the same episodes with the ``logprobs`` and ``entropy`` of before, which the batch was
        sampled from."""
        return self.run_scoring_update("update_actor_on_policy", batch, num_tokens, num_sequences)

    def sync_weights(self) -> None:
        """Give the engines the policy's weights."""
        self.workers.run("sync_weights")


class ReferenceWorkers(RoleWorkers):
    """The reference policy."""

    def __init__(self, workers: WorkerGroup, config: PPOConfig) -> None:
        super().__init__(workers, config.model.ulysses_sequence_parallel_size, config.actor.use_dynamic_bsz)

    def compute_logprobs(self, batch: Batch) -> Tensor:
        """[M]."""
        logprobs: Tensor = self.map_rows("compute_ref_logprobs", batch.columns("tokens")).logprobs
        return logprobs


class CriticWorkers(RoleWorkers):
    """The critic."""

    def __init__(self, workers: WorkerGroup, config: PPOConfig) -> None:
        critic = config.critic
        super().__init__(workers, critic.model.ulysses_sequence_parallel_size, critic.use_dynamic_bsz)

    def compute_values(self, batch: Batch) -> Tensor:
        """[M]."""
        values: Tensor = self.map_rows("compute_values", batch.columns("tokens")).values
        return values

    def update(self, batch: Batch, num_tokens: int) -> dict[str, float]:
        """One optimizer step on a mini-batch with ``learn_mask``, ``num_tokens`` in it, ``values`` and ``returns``."""
        return self.run_update("update_critic", batch.columns("tokens", "learn_mask", "values", "returns"), num_tokens)


class RewardModelWorkers(RoleWorkers):
    """The learned reward model."""

    def __init__(self, workers: WorkerGroup, config: PPOConfig) -> None:
        super().__init__(workers, config.reward_model.model.ulysses_sequence_parallel_size)

    def compute_scores(self, batch: Batch) -> Tensor:
        """[B], of texts in its own tokens (:func:`verl.models.reward_model_inputs.reward_model_batch`)."""
        scores: Tensor = self.map_rows("compute_rm_scores", batch).scores
        return scores


class SFTWorkers(RoleWorkers):
    """The model of supervised fine-tuning."""

    def __init__(self, workers: WorkerGroup, config: SFTConfig) -> None:
        super().__init__(workers, config.model.ulysses_sequence_parallel_size)

    def update(self, batch: Batch, num_tokens: int) -> dict[str, float]:
        """One optimizer step; ``num_tokens`` counts the tokens in ``learn_mask``."""
        return self.run_update("train_step", batch, num_tokens)

    def evaluate(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """[B] float64 each: the log-probability of what is to be learned of a conversation, and its tokens."""
        totals = self.map_rows("evaluate", batch)
        return totals.total_logprob, totals.num_learned
