"""Scores of the policy on held-out prompts."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from verl.data.prompts import PromptSample
from verl.protocol import RankMetrics, RolloutBatch
from verl.rank.calculator import RepresentationMetricsCalculator
from verl.rank.reward_manager import RewardManager
from verl.single_controller.roles import PolicyWorkers
from verl.trainer.logging.rollout_metrics import (
    correctness_groups,
    dataset_scalars,
    length_metrics,
    rank_scalars,
    response_metrics,
    with_prefix,
)
from verl.trainer.ppo.sampling import VALIDATION_STEP, Sampler, score_tensors


@dataclass(frozen=True)
class Validator:
    """Samples and scores every held-out prompt."""

    batches: Sequence[PromptSample]
    sampler: Sampler
    policy: PolicyWorkers
    """Measures rank metrics with ``calculator.source=actor``."""
    calculator: RepresentationMetricsCalculator | None
    """Of metrics over all responses together; None without rank metrics."""
    reward_manager: RewardManager
    """Read, never updated: its baselines are training's."""

    def validate(self) -> dict[str, float]:
        """Sample, score and measure.

        Returns:
            ``val/pass@1`` (share of correct responses, the mean over prompts and samples), mean score, verdicts by
            reason, lengths, rank metrics split by correctness, the scalars of all responses together, and for each
            data source ``val/<source>/pass@1`` and those of :func:`source_metrics`.
        """
        rollouts: list[Any] = []  # torch.cat is not annotated for tensorclasses
        scores, corrects = [], []
        reasons: Counter[str] = Counter()
        sources: list[str] = []
        for batch in self.batches:
            generated = self._generate(batch)
            batch_scores, verdicts, counts = score_tensors(self.sampler.verify(batch, generated))
            reasons.update(counts)
            rollouts.append(generated)
            scores.append(batch_scores)
            corrects.append(verdicts)
            samples = len(verdicts) // len(batch.records)
            sources += [record.data_source for record in batch.records for _ in range(samples)]
        rollout: Any = torch.cat(rollouts)
        score_0, correct = torch.cat(scores).double(), torch.cat(corrects)
        rewarded = score_0 + self._auxiliary_rewards(rollout.rank_metrics)
        together = self._dataset_scalars(rollout.rank_metrics)
        metrics = {"pass@1": correct.double().mean().item(), "score/mean": score_0.mean().item()}
        metrics |= {f"verifier/{reason}": float(count) for reason, count in reasons.items()}
        metrics |= length_metrics(rollout) | response_metrics(rollout, correct)
        metrics |= rank_scalars(rollout.rank_metrics, correct) | together
        for source in dict.fromkeys(sources):
            rows = torch.tensor([name == source for name in sources])
            part = rollout[rows]
            metrics |= source_metrics(source, part, score_0[rows], rewarded[rows], correct[rows])
            scalars = together if bool(rows.all()) else self._dataset_scalars(part.rank_metrics)
            metrics |= {f"{source}/{name.removeprefix('cal/')}": value for name, value in scalars.items()}
        return with_prefix("val", metrics)

    def _generate(self, prompts: PromptSample) -> RolloutBatch:
        """Responses with their rank metrics."""
        config = self.sampler.config
        rollout = self.sampler.generate(prompts, config.rollout.val_kwargs, VALIDATION_STEP)
        if config.calculator.measured_by("actor"):
            # As in training, the engine makes room for the policy; further batches wake it.
            self.policy.finish_generation()
            rollout = rollout.replace(rank_metrics=self.policy.compute_logprobs(rollout).rank_metrics)
        return rollout

    def _dataset_scalars(self, rank_metrics: RankMetrics) -> dict[str, float]:
        if self.calculator is None:
            return {}
        stride = self.sampler.config.calculator.global_diff_stride_val
        return dataset_scalars(rank_metrics.mean_states, self.calculator, stride)

    def _auxiliary_rewards(self, rank_metrics: RankMetrics) -> Tensor:
        """Phi [B] where training adds it to the reward, else 0."""
        if not self.reward_manager.config.add_reward:
            return torch.zeros(len(rank_metrics), dtype=torch.float64)
        return self.reward_manager.compute_phi(rank_metrics)[0]


def source_metrics(
    source: str, rollout: RolloutBatch, score_0: Tensor, rewarded: Tensor, correct: Tensor
) -> dict[str, float]:
    """Scores, lengths and rank metrics of one data source's responses, by both namings of the release.

    Its first version writes ``test_score/<source>`` and ``cal_overall/<source>/layer_1/Effective Rank``, the later ones
    ``<source>/test_score`` and ``<source>/layer_1/Effective Rank/overall``; so for ``test_score`` (with the auxiliary
    reward), ``test_score_0`` (without), ``test_correctness``, the mean lengths ``test_{overall,correct,incorrect}_len``
    and the groups ``overall``, ``correct`` and ``incorrect``. A group without responses is left out.

    ``score_0 [B]``, ``rewarded [B]`` and ``correct [B]`` are those of ``rollout``.
    """
    lengths = rollout.response_mask.sum(dim=1)
    quantities = {"test_score": rewarded, "test_score_0": score_0, "test_correctness": correct}
    quantities |= {f"test_{group}_len": lengths[rows] for group, rows in correctness_groups(correct).items()}
    metrics = {f"{source}/pass@1": correct.double().mean().item()}
    for name, values in quantities.items():
        if values.numel():
            mean = values.double().mean().item()
            metrics |= {f"{source}/{name}": mean, f"{name}/{source}": mean}
    for name, value in rank_scalars(rollout.rank_metrics, correct).items():
        match name.split("/"):
            case ["cal", ("overall" | "correct" | "incorrect") as group, layer, metric, "mean"]:
                metrics[f"cal_{group}/{source}/{layer}/{metric}"] = value
                metrics[f"{source}/{layer}/{metric}/{group}"] = value
    return metrics
