"""Typed handles of the models that a group of workers holds: one per role, which knows how its batches are shared out.

Legend: B rows, S columns, R response columns.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from verl.config.ppo import PPOConfig
from verl.config.rollout import SamplingConfig
from verl.config.sft import SFTConfig
from verl.protocol import ConversationBatch, PolicyBatch, PolicyScores, PromptBatch, RolloutBatch, TextBatch, ValueBatch
from verl.rollout.base import FinishedResponses
from verl.rollout.requests import ResponseSettings
from verl.single_controller.balance import balanced_order, dealt_groups
from verl.single_controller.generation import generate_responses
from verl.single_controller.worker_group import WorkerGroup, concat


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

    def map_rows(self, method: str, batch: Any) -> Any:
        """Call ``method`` on shares of ``batch`` and join the results, rows in the batch's order.

        Workers gather parameters together and must do equally many forward passes, so shares are filled up to one size
        with copies of the shortest row; their results are dropped.

        Args:
            batch: a tensorclass with ``attention_mask`` [B, S].

        Returns:
            What the workers return, a tensor, a tensorclass or a tuple of them whose first dimension is that of their
            share, [B, ...].
        """
        order, _ = self._shares(batch)
        joined = concat(self.workers.run_split(method, batch[order], copies=self.copies))
        back = _places(order)
        return tuple(part[back] for part in joined) if isinstance(joined, tuple) else joined[back]

    def run_update(self, method: str, batch: Any, *arguments: Any) -> dict[str, float]:
        """Call ``method`` on shares of ``batch``, whose rows may go to any worker; returns the first worker's metrics.

        All workers report the same. Shares are filled up as in :meth:`map_rows`, with nothing to learn from the copies.

        Args:
            batch: a tensorclass with ``attention_mask`` [B, S] and a mask of the tokens to learn.
        """
        metrics: dict[str, float] = self._learn(method, batch, arguments)[0][0]
        return metrics

    def run_scoring_update(self, method: str, batch: Any, *arguments: Any) -> tuple[dict[str, float], Any]:
        """As :meth:`run_update` with a method that returns metrics and results of its rows; these are joined, [B, ...],
        as by :meth:`map_rows`."""
        results, order = self._learn(method, batch, arguments)
        return results[0][0], concat([rows for _, rows in results])[_places(order)]

    def _learn(self, method: str, batch: Any, arguments: tuple[Any, ...]) -> tuple[list[Any], Tensor]:
        """What the workers return, and the order of the rows in their shares; nothing is learned from copies."""
        rows, order = self._to_learn(batch)
        return self.workers.run_split(method, rows, *arguments, copies=self.copies), order

    def _to_learn(self, batch: Any) -> tuple[Any, Tensor]:
        """The rows as they are cut into shares, and the order they are in."""
        order, copied = self._shares(batch)
        rows = batch[order]
        mask = rows.loss_mask if isinstance(rows, ConversationBatch) else rows.response_mask
        mask[copied] = 0
        return rows, order

    @property
    def _num_shares(self) -> int:
        return self.workers.world_size // self.copies

    def _shares(self, batch: Any) -> tuple[Tensor, Tensor]:
        """The rows in the order in which they are cut into shares, the shortest as often as it takes to make these
        equal, and, for each of them, whether it is such a copy."""
        lengths = batch.attention_mask.sum(dim=1)
        rows = torch.cat([torch.arange(len(batch)), lengths.argmin().repeat(-len(batch) % self._num_shares)])
        order = balanced_order(lengths[rows], self._num_shares) if self.balance else torch.arange(len(rows))
        return rows[order], order >= len(batch)


def _places(order: Tensor) -> Tensor:
    """Where each row is in ``order``."""
    places = torch.empty(int(order.max()) + 1, dtype=torch.int64)
    places[order] = torch.arange(len(order))
    return places


def _to_score(rollout: RolloutBatch) -> RolloutBatch:
    """Without what models do not read."""
    batch: RolloutBatch = rollout.exclude("rank_metrics", "rollout_logprobs")
    return batch


class PolicyWorkers(RoleWorkers):
    """The policy, and the engines that sample from it."""

    def __init__(self, workers: WorkerGroup, config: PPOConfig, whole_groups: bool = False) -> None:
        """``whole_groups``: the policy loss needs all responses to a prompt in one micro-batch."""
        super().__init__(workers, config.model.ulysses_sequence_parallel_size, config.actor.use_dynamic_bsz)
        self.config = config
        self.whole_groups = whole_groups

    def _to_learn(self, batch: PolicyBatch) -> tuple[PolicyBatch, Tensor]:
        """With ``whole_groups`` each stays together, and copies are in none: their ``group_ids`` are -1."""
        if not self.whole_groups:
            return super()._to_learn(batch)
        assert batch.extra is not None, "LossNeeds.sent has the groups"
        groups: Tensor = batch.extra["group_ids"]
        lengths = batch.attention_mask.sum(dim=1)
        units = dealt_groups(groups, lengths, self._num_shares, self.balance)
        rows = batch[units.rows]
        rows.response_mask[units.copied] = 0
        assert rows.extra is not None
        rows.extra["group_ids"] = groups[units.rows].masked_fill(units.copied, -1)
        rows.extra["unit"] = units.unit
        return rows, units.rows

    def generate(
        self,
        prompts: PromptBatch,
        sampling: SamplingConfig,
        seed: int,
        pad_token_id: int,
        on_finished: Callable[[FinishedResponses], None] = lambda part: None,
        settings: ResponseSettings | None = None,
    ) -> RolloutBatch:
        """See :func:`verl.single_controller.generation.generate_responses`."""
        return generate_responses(
            self.workers,
            self.config.rollout.tensor_parallel_size,
            prompts,
            sampling,
            seed,
            self.config.data.max_response_length,
            pad_token_id,
            self.config.trainer.deals_by_counts(self.workers.device_type),
            on_finished,
            settings,
        )

    def finish_generation(self) -> None:
        """Free the engines' memory until they generate again or get new weights."""
        self.workers.run("finish_generation")

    def compute_logprobs(self, rollout: RolloutBatch) -> PolicyScores:
        """What the policy says of the responses; with ``calculator.source=actor`` their rank metrics, too."""
        scores: PolicyScores = self.map_rows("compute_logprobs", _to_score(rollout))
        return scores

    def update(self, batch: PolicyBatch, num_tokens: int, num_sequences: int) -> dict[str, float]:
        """One optimizer step on a mini-batch; the counts are those of its ``response_mask``."""
        return self.run_update("update_actor", batch, num_tokens, num_sequences)

    def update_on_policy(
        self, batch: PolicyBatch, num_tokens: int, num_sequences: int
    ) -> tuple[dict[str, float], PolicyScores]:
        """As :meth:`update`, and what the policy said of the responses before; the batch was sampled from it."""
        return self.run_scoring_update("update_actor_on_policy", batch, num_tokens, num_sequences)

    def sync_weights(self) -> None:
        """Give the engines the policy's weights."""
        self.workers.run("sync_weights")


class ReferenceWorkers(RoleWorkers):
    """The reference policy."""

    def __init__(self, workers: WorkerGroup, config: PPOConfig) -> None:
        super().__init__(workers, config.model.ulysses_sequence_parallel_size, config.actor.use_dynamic_bsz)

    def compute_logprobs(self, rollout: RolloutBatch) -> Tensor:
        """[B, R]."""
        logprobs: Tensor = self.map_rows("compute_ref_logprobs", _to_score(rollout))
        return logprobs


class CriticWorkers(RoleWorkers):
    """The critic."""

    def __init__(self, workers: WorkerGroup, config: PPOConfig) -> None:
        critic = config.critic
        super().__init__(workers, critic.model.ulysses_sequence_parallel_size, critic.use_dynamic_bsz)

    def compute_values(self, rollout: RolloutBatch) -> Tensor:
        """[B, R]."""
        values: Tensor = self.map_rows("compute_values", _to_score(rollout))
        return values

    def update(self, batch: ValueBatch, num_tokens: int) -> dict[str, float]:
        """One optimizer step on a mini-batch with ``num_tokens`` tokens in its ``response_mask``."""
        return self.run_update("update_critic", batch, num_tokens)


class RewardModelWorkers(RoleWorkers):
    """The learned reward model."""

    def __init__(self, workers: WorkerGroup, config: PPOConfig) -> None:
        super().__init__(workers, config.reward_model.model.ulysses_sequence_parallel_size)

    def compute_scores(self, batch: TextBatch) -> Tensor:
        """[B]."""
        scores: Tensor = self.map_rows("compute_rm_scores", batch)
        return scores


class SFTWorkers(RoleWorkers):
    """The model of supervised fine-tuning."""

    def __init__(self, workers: WorkerGroup, config: SFTConfig) -> None:
        super().__init__(workers, config.model.ulysses_sequence_parallel_size)

    def update(self, batch: ConversationBatch, num_tokens: int) -> dict[str, float]:
        """One optimizer step; ``num_tokens`` counts the tokens to learn."""
        return self.run_update("train_step", batch, num_tokens)

    def evaluate(self, batch: ConversationBatch) -> Tensor:
        """[B, 2]: the log-probability of what is to be learned of each conversation, and the tokens it has."""
        results: Tensor = self.map_rows("evaluate", batch)
        return results
