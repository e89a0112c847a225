"""Scores of the policy on held-out prompts."""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

import torch

from verl.data.prompts import PromptSample
from verl.protocol import RolloutBatch
from verl.trainer.rollout_metrics import length_metrics, rank_scalars, with_prefix

Generate = Callable[[PromptSample], RolloutBatch]
Score = Callable[[PromptSample, RolloutBatch], tuple[torch.Tensor, torch.Tensor, dict[str, int]]]
DatasetScalars = Callable[[RolloutBatch], dict[str, float]]


def validate(
    batches: Sequence[PromptSample], generate: Generate, score: Score, dataset_scalars: DatasetScalars
) -> dict[str, float]:
    """Sample and score every held-out prompt.

    Args:
        batches: the held-out prompts.
        generate: samples the responses of a batch, neighbours where they share a prompt.
        score: gives scores [B] and correctness [B] of those responses, and the count of each reason for a verdict.
        dataset_scalars: gives the scalars of all responses together.

    Returns:
        ``val/pass@1`` (share of correct responses, the mean over prompts and samples), the same by data source, mean
        score, verdicts by reason, lengths, rank metrics split by correctness, and the dataset's scalars.
    """
    rollouts, scores, corrects = [], [], []
    reasons: Counter[str] = Counter()
    by_source: dict[str, list[bool]] = defaultdict(list)
    for batch in batches:
        rollout = generate(batch)
        batch_scores, correct, counts = score(batch, rollout)
        reasons.update(counts)
        rollouts.append(rollout)
        scores.append(batch_scores)
        corrects.append(correct)
        per_prompt = correct.view(len(batch.records), -1)
        for record, verdicts in zip(batch.records, per_prompt.tolist(), strict=True):
            by_source[record.data_source].extend(verdicts)
    rollout, correct = torch.cat(rollouts), torch.cat(corrects)
    metrics = {"pass@1": correct.double().mean().item(), "score/mean": torch.cat(scores).double().mean().item()}
    metrics |= {f"{source}/pass@1": sum(verdicts) / len(verdicts) for source, verdicts in by_source.items()}
    metrics |= {f"verifier/{reason}": float(count) for reason, count in reasons.items()}
    metrics |= length_metrics(rollout) | rank_scalars(rollout, correct) | dataset_scalars(rollout)
    return with_prefix("val", metrics)
