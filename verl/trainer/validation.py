"""Scores of the policy on held-out prompts."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from verl.data.prompts import TokenizedPrompts
from verl.protocol import RankMetrics, RolloutBatch
from verl.rank.calculator import RepresentationMetricsCalculator
from verl.rank.reward_manager import RewardManager
from verl.rank.token_metrics import with_token_metrics
from verl.trainer.logging.rollout_metrics import dataset_scalars, with_prefix
from verl.trainer.logging.sample_metrics import sample_figures
from verl.trainer.logging.source_metrics import logged_sources, metrics_by_source, response_figures, verdict_figures
from verl.trainer.ppo.adapt import PolicyWorkers
from verl.trainer.ppo.sampled import Sampled, finished
from verl.trainer.ppo.sampling import VALIDATION_STEP, Sampler, score_tensors


@dataclass(frozen=True)
class Validator:
    """Samples and scores every held-out prompt."""

    batches: Sequence[TokenizedPrompts]
    sampler: Sampler
    policy: PolicyWorkers
    """Measures rank metrics with ``calculator.source=actor``, and the log-probabilities behind those of tokens."""
    calculator: RepresentationMetricsCalculator | None
    """Of metrics over all responses together; None without rank metrics."""
    reward_manager: RewardManager
    """Read, never updated: its baselines are training's."""

    def validate(self) -> tuple[dict[str, float], list[Sampled]]:
        """Sample, score and measure.

        Returns:
            The responses, verified and measured, in batches; before them metrics:
            ``val/pass@1`` (share of correct responses, the mean over prompts and samples), mean score, verdicts by
            reason, numbers that custom reward functions returned, lengths, rank metrics split by correctness, and
            those of all responses together; with several data sources the same for each, ``val/<source>/pass@1`` and
            so on (``logged_sources``). With several responses to a prompt also what they achieve together
            (``sample_figures``).
        """
        sampled = [self._sample(batch) for batch in self.batches]
        # torch.cat is not annotated for tensorclasses.
        rollout: Any = torch.cat([cast(Any, batch.rollout) for batch in sampled])
        results = [result for batch in sampled for result in batch.pending.result()]
        sources = [source for batch in sampled for source in batch.sources]
        scores, correct, reasons = score_tensors(finished(results))
        score, samples = scores.double(), len(sampled[0].texts) // len(sampled[0].prompts.records)
        rewards = score + self._auxiliary_rewards(rollout.rank_metrics)

        def describe(rows: Tensor) -> dict[str, float]:
            chosen = [results[i] for i in rows.nonzero().flatten().tolist()]
            verdicts = verdict_figures(score[rows], correct[rows], chosen)
            figures = self._describe(rollout[rows], rewards[rows], correct[rows])
            return verdicts | figures | sample_figures(score[rows], correct[rows], chosen, samples)

        metrics = describe(torch.ones(len(score), dtype=torch.bool))
        metrics |= {f"verifier/{reason}": float(count) for reason, count in reasons.items()}
        metrics |= metrics_by_source(sources, logged_sources(sources), describe)
        return with_prefix("val", metrics), sampled

    @property
    def sources(self) -> list[str]:
        """The data sources of the prompts."""
        return list(dict.fromkeys(record.data_source for batch in self.batches for record in batch.records))

    def _describe(self, rollout: RolloutBatch, rewards: Tensor, correct: Tensor) -> dict[str, float]:
        """Scalars of these B responses besides the verdicts, from ``rewards [B]`` and ``correct [B]``."""
        metrics = response_figures(rollout, rollout.rank_metrics, correct)
        if self.reward_manager.config.add_reward:
            metrics["rewards/mean"] = rewards.mean().item()
        return metrics | self._dataset_scalars(rollout.rank_metrics)

    def _sample(self, prompts: TokenizedPrompts) -> Sampled:
        """Responses with their rank metrics, verified meanwhile."""
        config = self.sampler.config
        calculator = config.calculator
        sampled = self.sampler.sample(prompts, config.rollout.val_kwargs, VALIDATION_STEP)
        rollout = sampled.rollout
        scores, metrics = None, rollout.rank_metrics
        if calculator.measured_by("actor") or calculator.needs_policy:
            # As in training, the engine makes room for the policy; further batches wake it.
            self.policy.finish_generation()
            scores = self.policy.compute_logprobs(rollout)
            metrics = scores.rank_metrics if calculator.measured_by("actor") else metrics
        metrics = with_token_metrics(metrics, calculator.token_metrics, rollout, scores)
        return replace(sampled, rollout=rollout.replace(rank_metrics=metrics))

    def _dataset_scalars(self, rank_metrics: RankMetrics) -> dict[str, float]:
        stride = self.sampler.config.calculator.global_diff_stride_val
        return dataset_scalars(rank_metrics.mean_states, self.calculator, stride)

    def _auxiliary_rewards(self, rank_metrics: RankMetrics) -> Tensor:
        """Phi [B] where training adds it to the reward, else 0."""
        if not self.reward_manager.config.add_reward:
            return torch.zeros(len(rank_metrics), dtype=torch.float64)
        return self.reward_manager.compute_phi(rank_metrics)[0]
