"""Validation of the policy on held-out prompts."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from verl.batch import Batch
from verl.data.prompt_record import PromptRecord
from verl.rank.calculator import RepresentationMetricsCalculator
from verl.rank.reward_manager import RewardManager
from verl.rank.token_metrics import fill_token_metrics
from verl.single_controller.roles import PolicyWorkers
from verl.trainer.logging.rollout_metrics import (
    at_k_metrics,
    count_reasons,
    data_sources,
    length_metrics,
    logged_sources,
    metrics_by_source,
    response_metrics,
    score_metrics,
    select,
    with_prefix,
)
from verl.trainer.ppo.rollout_scheduler import VALIDATION_STEP, RolloutScheduler
from verl.trainer.ppo.verification import Verification


@dataclass(frozen=True)
class Validator:
    """Validator that samples and scores responses to every held-out prompt."""

    prompts: Sequence[list[PromptRecord]]
    """Held-out prompts, in batches."""
    scheduler: RolloutScheduler
    policy: PolicyWorkers
    """Workers that compute log-probabilities and, with ``calculator.source=actor``, rank metrics."""
    calculator: RepresentationMetricsCalculator | None
    """Calculator of metrics over all responses, or None if rank metrics are disabled."""
    reward_manager: RewardManager
    """Baselines from training, which validation does not modify."""

    def validate(self) -> tuple[dict[str, float], Batch]:
        """Sample and score responses, and return their metrics and the batch.

        Metrics include ``val/pass@1``, scores, counts of verdict reasons, values of custom functions, lengths, and rank
        metrics. Several responses per prompt add ``at_k_metrics``, and several data sources add ``val/<source>/...``.
        """
        parts = [self._sample(records) for records in self.prompts]
        for _, verification in parts:
            verification.finish()
        batch = Batch.join([part for part, _ in parts])
        sources, config, rewards = data_sources(batch), self.scheduler.config, None
        if self.reward_manager.config.add_reward:
            rewards = batch.scores.double() + self.reward_manager.compute_phi(batch.rank_metrics)[0]

        def metrics_of(rows: Tensor) -> dict[str, float]:
            chosen, verdicts = batch[rows], select(batch.verdicts, rows)
            metrics = score_metrics(verdicts) | length_metrics(chosen, config.data.max_prompt_length)
            metrics |= response_metrics(chosen, self.calculator, config.calculator.global_diff_stride_val)
            if rewards is not None:
                metrics["rewards/mean"] = rewards[rows].mean().item()
            return metrics | at_k_metrics(verdicts, config.rollout.val_kwargs.n)

        metrics = metrics_of(torch.ones(len(batch), dtype=torch.bool)) | count_reasons(batch.verdicts)
        metrics |= metrics_by_source(sources, logged_sources(sources), metrics_of)
        return with_prefix("val", metrics), batch

    def _sample(self, records: list[PromptRecord]) -> tuple[Batch, Verification]:
        """Sample responses and fill their rank metrics. The returned verification may still be running."""
        config = self.scheduler.config
        calculator = config.calculator
        batch, verification = self.scheduler.generate(records, config.rollout.val_kwargs, VALIDATION_STEP)
        if (calculator.enable and calculator.source == "actor") or calculator.needs_policy:
            # As in training, free the engine's memory for the policy; the next batch wakes the engine up.
            self.policy.finish_generation()
            batch.merge(self.policy.compute_logprobs(batch))
        fill_token_metrics(batch, calculator.token_metrics)
        return batch, verification
