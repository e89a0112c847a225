"""Scores of the policy on held-out prompts."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from verl.data.prompts import PromptSample
from verl.protocol import RolloutBatch
from verl.trainer.logging.rollout_metrics import (
    correctness_groups,
    length_metrics,
    rank_scalars,
    response_metrics,
    with_prefix,
)

Generate = Callable[[PromptSample], RolloutBatch]
Score = Callable[[PromptSample, RolloutBatch], tuple[Tensor, Tensor, dict[str, int]]]
DatasetScalars = Callable[[RolloutBatch], dict[str, float]]
Auxiliary = Callable[[RolloutBatch], Tensor]


def validate(
    batches: Sequence[PromptSample],
    generate: Generate,
    score: Score,
    dataset_scalars: DatasetScalars,
    auxiliary: Auxiliary | None = None,
) -> dict[str, float]:
    """Sample and score every held-out prompt.

    Args:
        batches: the held-out prompts.
        generate: samples the responses of a batch, neighbours where they share a prompt.
        score: gives scores [B] and correctness [B] of those responses, and the count of each reason for a verdict.
        dataset_scalars: gives the scalars of some responses together.
        auxiliary: gives the auxiliary reward [B] of all responses, where training adds one; counted in ``test_score``.

    Returns:
        ``val/pass@1`` (share of correct responses, the mean over prompts and samples), mean score, verdicts by reason,
        lengths, rank metrics split by correctness, the scalars of all responses together, and for each data source
        ``val/<source>/pass@1`` and those of :func:`source_metrics`.
    """
    rollouts: list[Any] = []  # torch.cat is not annotated for tensorclasses
    scores, corrects = [], []
    reasons: Counter[str] = Counter()
    sources: list[str] = []
    for batch in batches:
        generated = generate(batch)
        batch_scores, verdicts, counts = score(batch, generated)
        reasons.update(counts)
        rollouts.append(generated)
        scores.append(batch_scores)
        corrects.append(verdicts)
        samples = len(verdicts) // len(batch.records)
        sources += [record.data_source for record in batch.records for _ in range(samples)]
    rollout: Any = torch.cat(rollouts)
    score_0, correct = torch.cat(scores).double(), torch.cat(corrects)
    rewarded = score_0 if auxiliary is None else score_0 + auxiliary(rollout).double()
    together = dataset_scalars(rollout)
    metrics = {"pass@1": correct.double().mean().item(), "score/mean": score_0.mean().item()}
    metrics |= {f"verifier/{reason}": float(count) for reason, count in reasons.items()}
    metrics |= length_metrics(rollout) | response_metrics(rollout, correct) | rank_scalars(rollout, correct) | together
    for source in dict.fromkeys(sources):
        rows = torch.tensor([name == source for name in sources])
        part = rollout[rows]
        metrics |= source_metrics(source, part, score_0[rows], rewarded[rows], correct[rows])
        scalars = together if bool(rows.all()) else dataset_scalars(part)
        metrics |= {f"{source}/{name.removeprefix('cal/')}": value for name, value in scalars.items()}
    return with_prefix("val", metrics)


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
    for name, value in rank_scalars(rollout, correct).items():
        match name.split("/"):
            case ["cal", ("overall" | "correct" | "incorrect") as group, layer, metric, "mean"]:
                metrics[f"cal_{group}/{source}/{layer}/{metric}"] = value
                metrics[f"{source}/{layer}/{metric}/{group}"] = value
    return metrics
