"""Temporary: the roles of the workers with the one batch, over those with the old batches."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from verl.batch import Batch, RankMetrics
from verl.config.ppo import PPOConfig
from verl.config.rollout import SamplingConfig
from verl.data.prompt_rows import PromptRecord
from verl.protocol import PolicyBatch, PolicyScores, PromptBatch, RolloutBatch, ValueBatch
from verl.rollout.base import FinishedResponses
from verl.rollout.requests import ResponseSettings
from verl.single_controller import roles
from verl.single_controller.roles import RewardModelWorkers as RewardModelWorkers
from verl.single_controller.worker_group import WorkerGroup
from verl.workers import policy_loss
from verl.workers.policy_loss import OLD, PREPARED

PAD = 0


def from_rollout(rollout: RolloutBatch) -> Batch:
    mask = rollout.attention_mask.bool()
    response = rollout.response_mask.sum(dim=1)
    batch = Batch(mask.sum(dim=1) - response, response, rollout.response_mask.shape[1])
    return batch.fill(
        tokens=rollout.input_ids[mask],
        rollout_logprobs=rollout.rollout_logprobs,
        truncated=rollout.truncated,
        rank_metrics=rollout.rank_metrics,
    )


def rows(batch: Batch, config: PPOConfig) -> tuple[Tensor, Tensor]:
    num = config.data.max_prompt_length
    places = torch.arange(-num, batch.width)
    there = (places >= -batch.prompt_lengths[:, None]) & (places < batch.response_lengths[:, None])
    ids = torch.full(there.shape, PAD)
    ids[there] = batch.tokens
    return ids, there.long()


def rollout_of(batch: Batch, config: PPOConfig) -> RolloutBatch:
    ids, attention = rows(batch, config)
    size = len(batch)
    return RolloutBatch(
        ids,
        attention,
        batch.mask.long(),
        torch.zeros(batch.mask.shape),
        torch.zeros(size),
        torch.zeros(size),
        RankMetrics.none(size),
        batch_size=[size],
    )


def from_scores(batch: Batch, scores: PolicyScores) -> Batch:
    found = batch.columns().fill(logprobs=scores.logprobs, entropy=scores.entropy)
    if scores.statistics is not None:
        found.fill(**{str(name): scores.statistics[name] for name in scores.statistics.keys()})
    if scores.rank_metrics.metric_names:
        found.fill(rank_metrics=scores.rank_metrics)
    return found


def padded_any(batch: Batch, name: str) -> Tensor:
    return batch.padded(name) if batch._kinds[name] != "episode" else getattr(batch, name)


class PolicyLoss(policy_loss.PolicyLoss):
    config: Any = None

    def columns(self) -> list[str]:
        return [{"group_ids": "group", "old_entropy": "entropy"}.get(n, n) for n in self.needs.sent] + list(
            self.needs.old_statistics
        )

    def prepared(self, mini: Batch, size: Any) -> Batch:  # type: ignore[override]
        if self.needs.prepare is None:
            return mini
        found = super().prepared(policy_batch(mini, self.config, self.needs), size).extra
        assert found is not None
        return mini.columns(*mini.names).fill(**{str(n): found[n] for n in found.keys() if str(n).startswith(PREPARED)})


def policy_batch(mini: Batch, config: PPOConfig, needs: Any) -> PolicyBatch:
    ids, attention = rows(mini, config)
    extra: dict[str, Tensor] = {}
    for name in needs.sent:
        extra[name] = padded_any(mini, {"group_ids": "group", "old_entropy": "entropy"}.get(name, name))
        if name in ("rewards", "scores"):
            extra[name] = extra[name].float()
    for name in needs.old_statistics:
        extra[OLD + name] = mini.padded(name)
    for name in mini.names:
        if name.startswith(PREPARED):
            extra[name] = padded_any(mini, name)
    old = mini.padded("old_logprobs")
    return PolicyBatch(
        ids,
        attention,
        mini.padded("learn_mask").long(),
        old,
        mini.padded("rollout_logprobs") if "rollout_logprobs" in mini else old,
        mini.padded("ref_logprobs") if "ref_logprobs" in mini else old,
        mini.padded("advantages"),
        TensorDict(extra, batch_size=[len(mini)]) if extra else None,
        batch_size=[len(mini)],
    )


class PolicyWorkers(roles.PolicyWorkers):
    def __init__(self, workers: WorkerGroup, config: PPOConfig, whole_groups: bool = False) -> None:
        super().__init__(workers, config, whole_groups)
        self.needs = PolicyLoss(config.actor).needs

    def generate(  # type: ignore[override]
        self,
        records: Sequence[PromptRecord],
        n: int,
        sampling: SamplingConfig,
        seed: int,
        on_finished: Callable[[Batch], None],
        settings: ResponseSettings | None = None,
    ) -> Batch:
        num = self.config.data.max_prompt_length
        ids, mask = torch.full((len(records), num), PAD), torch.zeros(len(records), num, dtype=torch.int64)
        for row, record in enumerate(records):
            ids[row, -len(record.input_ids) :] = torch.tensor(record.input_ids)
            mask[row, -len(record.input_ids) :] = 1
        uid = torch.tensor([record.uid for record in records])
        prompts = PromptBatch(ids, mask, uid, batch_size=[len(records)])

        def finished(part: FinishedResponses) -> None:
            prompt = [records[row // n].input_ids for row in part.rows]
            on_finished(Batch.of(prompt, part.tokens(), request=torch.tensor(part.rows)))

        if settings is not None and settings.temperatures is not None:
            table = settings.temperatures[None].repeat(len(records) * n, axis=0)
            settings = ResponseSettings(settings.overrides, table)
        return from_rollout(super().generate(prompts, sampling, seed, PAD, finished, settings))

    def compute_logprobs(self, batch: Batch) -> Batch:  # type: ignore[override]
        return from_scores(batch, super().compute_logprobs(rollout_of(batch, self.config)))

    def update(self, batch: Batch, num_tokens: int, num_sequences: int) -> dict[str, float]:  # type: ignore[override]
        return super().update(policy_batch(batch, self.config, self.needs), num_tokens, num_sequences)

    def update_on_policy(  # type: ignore[override]
        self, batch: Batch, num_tokens: int, num_sequences: int
    ) -> tuple[dict[str, float], Batch]:
        mini = policy_batch(batch, self.config, self.needs)
        metrics, scores = super().update_on_policy(mini, num_tokens, num_sequences)
        return metrics, from_scores(batch, scores)


class ReferenceWorkers(roles.ReferenceWorkers):
    def __init__(self, workers: WorkerGroup, config: PPOConfig) -> None:
        super().__init__(workers, config)
        self.config = config

    def compute_logprobs(self, batch: Batch) -> Tensor:  # type: ignore[override]
        return super().compute_logprobs(rollout_of(batch, self.config))[batch.mask]


class CriticWorkers(roles.CriticWorkers):
    def __init__(self, workers: WorkerGroup, config: PPOConfig) -> None:
        super().__init__(workers, config)
        self.config = config

    def compute_values(self, batch: Batch) -> Tensor:  # type: ignore[override]
        return super().compute_values(rollout_of(batch, self.config))[batch.mask]

    def update(self, batch: Batch, num_tokens: int) -> dict[str, float]:  # type: ignore[override]
        ids, attention = rows(batch, self.config)
        mask = batch.padded("learn_mask").long()
        values, returns = batch.padded("values"), batch.padded("returns")
        mini = ValueBatch(ids, attention, mask, values, returns, batch_size=[len(batch)])
        return super().update(mini, num_tokens)
