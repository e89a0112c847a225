"""Scores of the policy on held-out prompts."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from verl.batch import Batch
from verl.data.prompt_rows import PromptRecord
from verl.rank.calculator import RepresentationMetricsCalculator
from verl.rank.reward_manager import RewardManager
from verl.rank.token_metrics import fill_token_metrics
from verl.single_controller.roles import PolicyWorkers
from verl.trainer.logging.rollout_metrics import (
    count_reasons,
    data_sources,
    length_metrics,
    logged_sources,
    metrics_by_source,
    response_metrics,
    sample_figures,
    verdict_figures,
    with_prefix,
)
from verl.trainer.ppo.rollout_scheduler import VALIDATION_STEP, RolloutScheduler
from verl.trainer.ppo.verification import Verification


@dataclass(frozen=True)
class Validator:
    """Samples and scores every held-out prompt."""

    prompts: Sequence[list[PromptRecord]]
    """The held-out prompts, in batches that are sampled together."""
    scheduler: RolloutScheduler
    policy: PolicyWorkers
    """Measures rank metrics with ``calculator.source=actor``, and the log-probabilities behind those of tokens."""
    calculator: RepresentationMetricsCalculator | None
    """Of metrics over all responses together; None without rank metrics."""
    reward_manager: RewardManager
    """Read, never updated: its baselines are training's."""

    def validate(self) -> tuple[dict[str, float], Batch]:
        """Sample, score and measure.

        Returns:
            Metrics, and the responses, verified and measured. The metrics are ``val/pass@1`` (share of correct
            responses, the mean over prompts and samples), mean score, verdicts by reason, numbers that custom reward
            functions returned, lengths, and rank metrics split by correctness and of all responses together; with
            several data sources the same for each, ``val/<source>/pass@1`` and so on (``logged_sources``). With several
            responses to a prompt also their joint figures (``sample_figures``).
        """
        parts = [self._sample(records) for records in self.prompts]
        for _, verification in parts:
            verification.finish()
        batch = Batch.join([part for part, _ in parts])
        sources, verdicts, config = data_sources(batch), batch.verdicts, self.scheduler.config
        score, samples, rewards = batch.scores.double(), config.rollout.val_kwargs.n, None
        if self.reward_manager.config.add_reward:
            rewards = score + self.reward_manager.compute_phi(batch.rank_metrics)[0]

        def describe(rows: Tensor) -> dict[str, float]:
            chosen, results = batch[rows], [verdicts[i] for i in rows.nonzero().flatten().tolist()]
            figures = verdict_figures(score[rows], chosen.correct, results)
            figures |= length_metrics(chosen, config.data.max_prompt_length)
            figures |= response_metrics(chosen, self.calculator, config.calculator.global_diff_stride_val)
            if rewards is not None:
                figures["rewards/mean"] = rewards[rows].mean().item()
            return figures | sample_figures(score[rows], chosen.correct, results, samples)

        metrics = describe(torch.ones(len(batch), dtype=torch.bool)) | count_reasons(verdicts)
        metrics |= metrics_by_source(sources, logged_sources(sources), describe)
        return with_prefix("val", metrics), batch

    def _sample(self, records: list[PromptRecord]) -> tuple[Batch, Verification]:
        """Return responses with their rank metrics, and the verification that may still run."""
        config = self.scheduler.config
        calculator = config.calculator
        batch, verification = self.scheduler.generate(records, config.rollout.val_kwargs, VALIDATION_STEP)
        if (calculator.enable and calculator.source == "actor") or calculator.needs_policy:
            # As in training, the engine makes room for the policy; further batches wake it.
            self.policy.finish_generation()
            batch.merge(self.policy.compute_logprobs(batch))
        fill_token_metrics(batch, calculator.token_metrics)
        return batch, verification
