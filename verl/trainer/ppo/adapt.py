"""Padded batches of the training loop, to and from the flat ones of the role handles. Goes with the padded ones."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from verl.batch import Batch, RankMetrics
from verl.config.rollout import SamplingConfig
from verl.protocol import PolicyBatch, PolicyScores, PromptBatch, RolloutBatch, ValueBatch
from verl.rollout.requests import ResponseSettings
from verl.single_controller import roles


def flat(rows: Any, **columns: Any) -> Batch:
    """A batch with the tokens of ``rows``, and ``columns`` [B, R] or [B]."""
    mask, width = rows.attention_mask.bool(), rows.response_mask.shape[1]
    lengths = (mask[:, :-width].sum(dim=1), mask[:, -width:].sum(dim=1))
    return Batch(*lengths, width, tokens=rows.input_ids[mask], **columns)


def flat_policy_batch(batch: PolicyBatch) -> Batch:
    """What the policy's update needs."""
    names = ("old_logprobs", "rollout_logprobs", "ref_logprobs", "advantages")
    extra: Any = {} if batch.extra is None else dict(batch.extra.items())
    numbers = {name: getattr(batch, name) for name in names}
    return flat(batch, learn_mask=batch.response_mask.bool(), **numbers, **extra)


def padded_scores(scored: Batch) -> PolicyScores:
    """What :class:`PolicyScores` has of them."""
    others = {n: scored.padded(n) for n in scored.names if n not in ("logprobs", "entropy", "rank_metrics")}
    size = [len(scored)]
    metrics = scored.rank_metrics if "rank_metrics" in scored else RankMetrics.none(len(scored))
    tensors = TensorDict(others, batch_size=size) if others else None
    return PolicyScores(scored.padded("logprobs"), scored.padded("entropy"), metrics, tensors, batch_size=size)


def padded_rollout(batch: Batch, prompts: PromptBatch, n: int, pad_token_id: int) -> RolloutBatch:
    """``n`` responses to each of the prompts."""
    repeated, mask = prompts.repeat_interleave(n), batch.mask.long()
    return RolloutBatch(
        input_ids=torch.cat([repeated.input_ids, batch.padded("response_tokens", pad_token_id)], dim=1),
        attention_mask=torch.cat([repeated.attention_mask, mask], dim=1),
        response_mask=mask,
        rollout_logprobs=batch.padded("rollout_logprobs"),
        group_ids=repeated.uid,
        truncated=batch.truncated,
        rank_metrics=batch.rank_metrics,
        batch_size=[len(batch)],
    )


class PolicyWorkers(roles.PolicyWorkers):
    """With padded batches."""

    def generate(  # type: ignore[override]
        self,
        prompts: PromptBatch,
        sampling: SamplingConfig,
        seed: int,
        pad_token_id: int,
        on_finished: Callable[[Batch], None] = lambda part: None,
        settings: ResponseSettings | None = None,
    ) -> RolloutBatch:
        rows = zip(prompts.input_ids, prompts.attention_mask.bool(), prompts.uid.tolist(), strict=True)
        records: Any = [SimpleNamespace(input_ids=ids[mask].tolist(), uid=uid) for ids, mask, uid in rows]
        batch = super().generate(records, sampling.n, sampling, seed, on_finished, settings)
        return padded_rollout(batch, prompts, sampling.n, pad_token_id)

    def compute_logprobs(self, rollout: RolloutBatch) -> PolicyScores:  # type: ignore[override]
        return padded_scores(super().compute_logprobs(flat(rollout)))

    def update_on_policy(  # type: ignore[override]
        self, batch: Batch, num_tokens: int, num_sequences: int
    ) -> tuple[dict[str, float], PolicyScores]:
        metrics, scored = super().update_on_policy(batch, num_tokens, num_sequences)
        return metrics, padded_scores(scored)


class ReferenceWorkers(roles.ReferenceWorkers):
    """With padded batches."""

    def compute_logprobs(self, rollout: RolloutBatch) -> Tensor:  # type: ignore[override]
        batch = flat(rollout)
        return batch.pad(super().compute_logprobs(batch))


class CriticWorkers(roles.CriticWorkers):
    """With padded batches."""

    def compute_values(self, rollout: RolloutBatch) -> Tensor:  # type: ignore[override]
        batch = flat(rollout)
        return batch.pad(super().compute_values(batch))

    def update(self, batch: ValueBatch, num_tokens: int) -> dict[str, float]:  # type: ignore[override]
        mask = batch.response_mask.bool()
        return super().update(flat(batch, learn_mask=mask, values=batch.old_values, returns=batch.returns), num_tokens)
