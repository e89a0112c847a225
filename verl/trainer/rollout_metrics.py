"""Scalars that describe a batch of rollouts: lengths, scores, rank metrics. Names are those of the paper's release."""

from collections.abc import Mapping

import torch
from torch import Tensor

from verl.protocol import RolloutBatch, layer_metrics
from verl.trainer.metrics_calculator import RepresentationMetricsCalculator


def length_metrics(batch: RolloutBatch) -> dict[str, float]:
    """Prompt and response lengths in tokens, and the share of responses cut at the limit."""
    response = batch.response_mask.sum(dim=1).double()
    prompt = batch.attention_mask.sum(dim=1).double() - response
    return {
        "prompt_length/mean": prompt.mean().item(),
        "response_length/mean": response.mean().item(),
        "response_length/max": response.max().item(),
        "response_length/min": response.min().item(),
        "response_length/clip_ratio": batch.truncated.double().mean().item(),
    }


def rank_scalars(batch: RolloutBatch, correct: Tensor) -> dict[str, float]:
    """Means of every rank metric over all, the correct and the incorrect responses, and how many have none.

    ``cal/{overall,correct,incorrect}/layer_1/Effective Rank/mean`` and so on; a group without responses is left out.
    Responses whose hidden states held NaN or infinity have no share in the means and are counted in
    ``cal/overall/layer_1/nonfinite``.
    """
    groups = {"overall": torch.ones_like(correct, dtype=torch.bool), "correct": correct, "incorrect": ~correct}
    scalars = {}
    for layer, metrics in layer_metrics(batch.rank_metrics).items():
        finite = torch.stack(list(metrics.values())).isfinite().all(dim=0)
        scalars[f"cal/overall/layer_{layer}/nonfinite"] = float((~finite).sum())
        for name, values in metrics.items():
            for group, members in groups.items():
                if (members & finite).any():
                    scalars[f"cal/{group}/layer_{layer}/{name}/mean"] = values[members & finite].mean().item()
    return scalars


def dataset_scalars(
    batch: RolloutBatch, calculator: RepresentationMetricsCalculator, diff_stride: int
) -> dict[str, float]:
    """Rank metrics of the [B, D] matrix of the batch's mean states, ``cal/layer_1/global/Effective Rank`` and so on.

    ``diff_stride`` is the number of responses between two prefixes of the cumulative metrics.
    """
    return {
        f"cal/layer_{layer + 1}/{name}": value
        for layer in range(batch.mean_states.shape[1])
        for name, value in calculator.dataset_metrics(batch.mean_states[:, layer], diff_stride).items()
    }


def logprob_agreement(rollout: Tensor, trainer: Tensor, mask: Tensor) -> dict[str, float]:
    """How far the engine's log-probabilities are from the trainer's, in nats: mean and largest over response tokens."""
    difference = (rollout - trainer).abs()[mask.bool()].double()
    return {
        "rollout/logprob_abs_diff": difference.mean().item(),
        "rollout/logprob_abs_diff_max": difference.max().item(),
    }


def group_metrics(scores: Tensor, correct: Tensor, group_ids: Tensor) -> dict[str, float]:
    """Scores, sampled pass@1, and the share of prompts whose responses all score alike and so teach nothing."""
    _, index = group_ids.unique(return_inverse=True)
    order = index.argsort(stable=True)
    grouped = scores[order].view(int(index.max()) + 1, -1)
    return {
        "score/mean": scores.double().mean().item(),
        "train/pass@1": correct.double().mean().item(),
        "train/groups_without_variance": (grouped == grouped[:, :1]).all(dim=1).double().mean().item(),
    }


def with_prefix(prefix: str, metrics: Mapping[str, float]) -> dict[str, float]:
    """``{name: value}`` -> ``{prefix/name: value}``."""
    return {f"{prefix}/{name}": value for name, value in metrics.items()}
