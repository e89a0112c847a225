"""Scalars that describe a batch of rollouts: lengths, scores, rank metrics. docs/metrics.md lists them.

Legend: B responses, R response columns.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from verl.algorithms.rollout_correction import mismatch_metrics
from verl.batch import Batch, RankMetrics
from verl.rank.calculator import RepresentationMetricsCalculator


def length_metrics(batch: Batch, max_prompt_length: int) -> dict[str, float]:
    """Prompt and response lengths in tokens, and the share of each at its limit.

    ``prompt_length/clip_ratio`` is the share of prompts as long as ``data.max_prompt_length``,
    ``response_length/clip_ratio`` that of responses cut at ``data.max_response_length``.
    """
    return {
        **_spread("prompt_length", batch.prompt_lengths),
        "prompt_length/clip_ratio": (batch.prompt_lengths == max_prompt_length).double().mean().item(),
        **_spread("response_length", batch.response_lengths),
        "response_length/clip_ratio": batch.truncated.double().mean().item(),
    }


def response_metrics(batch: Batch) -> dict[str, float]:
    """Numbers of correct and incorrect responses, and the lengths of these.

    ``cal/{num_correct,num_incorrect}`` and ``response_length/{correct,incorrect}/{mean,max,min,clip_ratio}``. A group
    without responses is left out; the release logs a length of 0, which no response has.
    """
    lengths, correct = batch.response_lengths, batch.correct
    metrics = {"cal/num_correct": float(correct.sum()), "cal/num_incorrect": float((~correct).sum())}
    for group, members in {"correct": correct, "incorrect": ~correct}.items():
        if members.any():
            metrics |= _spread(f"response_length/{group}", lengths[members])
            metrics[f"response_length/{group}/clip_ratio"] = batch.truncated[members].double().mean().item()
    return metrics


def filtered_length_metrics(response_mask: Tensor, max_length: int) -> dict[str, float]:
    """Lengths of the responses that are learned from, ``filtered_response_length/{mean,max,min,clip_ratio}``.

    ``response_mask [B, R]`` after ``trainer.remove_clip`` emptied the rows of truncated responses. Those rows do not
    count (in the release they do, with length 0), so nothing is logged where all were emptied. ``clip_ratio`` is the
    share with ``max_length`` tokens.
    """
    lengths = response_mask.sum(dim=1)
    lengths = lengths[lengths > 0]
    if not lengths.numel():
        return {}
    prefix = "filtered_response_length"
    return _spread(prefix, lengths) | {f"{prefix}/clip_ratio": (lengths == max_length).double().mean().item()}


def learning_metrics(
    scores_0: Tensor,
    token_scores: Tensor,
    token_rewards: Tensor,
    advantages_0: Tensor,
    advantages: Tensor,
    returns: Tensor | None,
    values: Tensor | None,
    response_mask: Tensor,
) -> dict[str, float]:
    """Mean, max and min of what the update learns from, under ``critic/``, as in veRL.

    Over responses ``score_0``, ``score`` and ``rewards``; over response tokens ``advantages_0``, ``advantages``, and
    where they are given ``returns``, ``values`` and ``vf_explained_var``.

    Args:
        scores_0: the verifiers' scores ``[B]``.
        token_scores: those with the auxiliary signal, if any, ``[B, R]``; summed over each row.
        token_rewards: those less the KL penalty, if any, ``[B, R]``; summed over each row.
        advantages_0: before rank shaping, ``[B, R]``.
        advantages: after rank shaping, ``[B, R]``.
        returns: ``[B, R]``, or ``None``.
        values: the critic's, ``[B, R]``, or ``None``; asks for ``returns``.
        response_mask: ``[B, R]``, 1 on response tokens.
    """
    mask = response_mask.bool()
    metrics = {
        **_spread("critic/score_0", scores_0),
        **_spread("critic/score", token_scores.double().sum(dim=1)),
        **_spread("critic/rewards", token_rewards.double().sum(dim=1)),
        **_spread("critic/advantages_0", advantages_0[mask]),
        **_spread("critic/advantages", advantages[mask]),
    }
    if returns is not None:
        metrics |= _spread("critic/returns", returns[mask])
    if returns is not None and values is not None and mask.any():
        target, error = returns[mask].double(), (returns - values)[mask].double()
        metrics |= _spread("critic/values", values[mask])
        # The addend keeps constant returns from a division by zero.
        explained = 1 - error.var(correction=0) / (target.var(correction=0) + 1e-5)
        metrics["critic/vf_explained_var"] = explained.item()
    return metrics


def rank_scalars(rank_metrics: RankMetrics, correct: Tensor) -> dict[str, float]:
    """Mean, max and min of every rank metric over all, the correct and the incorrect responses.

    ``cal/{overall,correct,incorrect}/layer_1/Effective Rank/{mean,max,min}`` and so on; a group without responses is
    left out. Responses whose hidden states held NaN or infinity are left out too and counted in
    ``cal/overall/layer_1/nonfinite``.
    """
    groups = {"overall": torch.ones_like(correct), "correct": correct, "incorrect": ~correct}
    scalars = {}
    for layer, metrics in enumerate(rank_metrics.by_layer(), start=1):
        finite = torch.stack(list(metrics.values())).isfinite().all(dim=0)
        scalars[f"cal/overall/layer_{layer}/nonfinite"] = float((~finite).sum())
        for name, values in metrics.items():
            for group, members in groups.items():
                scalars |= _spread(f"cal/{group}/layer_{layer}/{name}", values[members & finite])
    return scalars


def dataset_scalars(
    mean_states: Tensor, calculator: RepresentationMetricsCalculator | None, diff_stride: int
) -> dict[str, float]:
    """Rank metrics of each layer's matrix of mean states, ``cal/layer_1/global/Effective Rank`` and so on; none without
    a calculator.

    ``mean_states`` are [B, L, D]; ``diff_stride`` is the number of responses between two prefixes of the cumulative
    metrics.
    """
    if calculator is None:
        return {}
    return {
        f"cal/layer_{layer + 1}/{name}": value
        for layer in range(mean_states.shape[1])
        for name, value in calculator.dataset_metrics(mean_states[:, layer], diff_stride).items()
    }


def policy_metrics(batch: Batch, tis_level: str, tis_cap: float) -> dict[str, float]:
    """The policy's mean entropy in nats, ``actor/entropy``, and how far the engine was from it: that of
    :func:`logprob_agreement`, and ``rollout_corr/*``, see :func:`verl.algorithms.rollout_correction.mismatch_metrics`.

    Args:
        batch: with ``logprobs`` and ``entropy`` of the policy that sampled it.
        tis_level, tis_cap: those of the actor's configuration.
    """
    pair, mask = (batch.padded("logprobs"), batch.padded("rollout_logprobs")), batch.mask
    level = "sequence" if tis_level == "sequence" else "token"
    return {
        **logprob_agreement(batch.rollout_logprobs, batch.logprobs),
        **with_prefix("rollout_corr", mismatch_metrics(*pair, mask, level, tis_cap)),
        "actor/entropy": (batch.padded("entropy").double().sum() / mask.sum()).item(),
    }


def logprob_agreement(rollout: Tensor, trainer: Tensor) -> dict[str, float]:
    """How far the engine's log-probabilities [M] are from the trainer's, in nats: mean and largest."""
    difference = (rollout - trainer).abs().double()
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


def _spread(prefix: str, values: Tensor) -> dict[str, float]:
    """``prefix/{mean,max,min}`` of ``values``; nothing for none."""
    if not values.numel():
        return {}
    values = values.double()
    return {
        f"{prefix}/mean": values.mean().item(),
        f"{prefix}/max": values.max().item(),
        f"{prefix}/min": values.min().item(),
    }
