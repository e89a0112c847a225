"""Measures and corrects the mismatch between the policies of the rollout engine and the trainer.

The two policies have the same weights but use different kernels and precisions. Rejection rules and metrics follow
veRL's rollout correction (Liu, Li et al. 2025, "When Speed Kills Stability: Demystifying RL Collapse from the
Training-Inference Mismatch"). Truncated importance sampling follows Yao et al. 2025, "Your Efficient RL Framework
Secretly Brings You Off-Policy RL Training".

Shapes: B responses, R response columns. ``old_logprobs [B, R]`` come from the trainer before the update, and
``rollout_logprobs [B, R]`` from the engine, both in nats. ``response_mask [B, R]`` is true or 1 on response tokens;
values outside it are ignored.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from verl.algorithms.losses.per_token import MAX_LOG_RATIO

Rule = tuple[str, float | None, float]
"""Name, lower bound (or None) and upper bound of a rule. The name consists of a level (``token``, ``seq_sum``,
``seq_mean`` or ``seq_max``), an underscore, and ``k1``, ``k2`` or ``k3``. For k1, the bounds apply to the ratio
p_rollout / p_trainer. For k2 and k3, the upper bound applies to the divergence in nats, and there is no lower bound."""


def rejection_mask(
    old_logprobs: Tensor, rollout_logprobs: Tensor, response_mask: Tensor, rules: Sequence[Rule]
) -> tuple[Tensor, dict[str, float]]:
    """Return a mask of the tokens that pass all rules, and the fractions of rejected tokens and responses.

    Args:
        rules: at least one rule; a ``seq_*`` rule accepts or rejects whole responses.

    Returns:
        ``[B, R]`` bool, false outside the mask, and the fractions of rejected tokens (``masked_fraction``) and of
        responses with a rejected token (``seq_masked_fraction``), in total and per rule.
    """
    mask = response_mask.bool()
    keep = mask
    metrics: dict[str, float] = {}
    for name, lower, upper in rules:
        values = _divergence(name, old_logprobs, rollout_logprobs, mask)
        passed = values <= (math.log(upper) if name.endswith("k1") else upper)
        if lower is not None:  # k1 only
            passed = passed & (values >= math.log(lower))
        metrics |= _shares(f"rollout_rs_{name}_", passed, mask)
        keep = keep & passed
    return keep, metrics | _shares("rollout_rs_", keep, mask)


def mismatch_metrics(
    old_logprobs: Tensor, rollout_logprobs: Tensor, response_mask: Tensor, level: str, cap: float, floor: float = 0.0
) -> dict[str, float]:
    """Compute metrics of the mismatch between the two policies and of the importance weights.

    Args:
        response_mask: mask with at least one token in each row.
        level: ``token`` for the ratio of each token, or ``sequence`` for the ratio of the whole response.
        cap: bound on the weights, which are clamped to [1 / cap, cap] for the effective sample size.
        floor: if above 0, lower bound instead of 1 / cap; in the effective sample size, weights out of bounds are 0.

    Returns:
        veRL's metrics. ``kl`` and ``k3_kl`` estimate KL(rollout || trainer) in nats per token, and ``chi2_token`` and
        ``chi2_seq`` estimate the chi-square divergence per token and per response. Metrics with ``ppl`` in their names
        are perplexities. ``rollout_is_*`` describe the importance weights: mean, extremes, fractions above ``cap`` and
        below the lower bound, and the effective sample size as a fraction of the batch.
    """
    mask = response_mask.bool()
    # 1. Compute the log-ratios of tokens and of whole responses.
    old, rollout = (torch.where(mask, t.double(), 0.0) for t in (old_logprobs, rollout_logprobs))
    lengths, log_ratio = mask.sum(dim=1), old - rollout
    tokens = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    whole = log_ratio.sum(dim=1).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    # 2. Compute the log-perplexity of each response.
    log_ppl, rollout_log_ppl = -old.sum(dim=1) / lengths, -rollout.sum(dim=1) / lengths
    gap = log_ppl - rollout_log_ppl
    # 3. Compute the importance weights of all tokens, and the ratios at ``level``.
    weights = (tokens if level == "token" else whole[:, None].expand_as(tokens)).exp()[mask]
    ratios = weights if level == "token" else whole.exp()
    low, high = (floor, cap) if floor else sorted((1 / cap, cap))
    bounded = weights.clamp(low, high)
    bounded = bounded * (bounded == weights) if floor else bounded
    figures = {
        "kl": -log_ratio[mask].mean(),
        "k3_kl": (tokens.expm1() - tokens)[mask].mean(),
        "training_ppl": log_ppl.exp().mean(),
        "training_log_ppl": log_ppl.mean(),
        "rollout_ppl": rollout_log_ppl.exp().mean(),
        "rollout_log_ppl": rollout_log_ppl.mean(),
        "log_ppl_diff": gap.mean(),
        "log_ppl_abs_diff": gap.abs().mean(),
        "log_ppl_diff_max": gap.max(),
        "log_ppl_diff_min": gap.min(),
        "ppl_ratio": gap.exp().mean(),
        "chi2_token": (2 * tokens).exp()[mask].mean() - 1,
        "chi2_seq": (2 * whole).exp().mean() - 1,
        "rollout_is_mean": weights.mean(),
        "rollout_is_max": weights.max(),
        "rollout_is_min": weights.min(),
        "rollout_is_ratio_fraction_high": (ratios > high).double().mean(),
        "rollout_is_ratio_fraction_low": (ratios < low).double().mean(),
        "rollout_is_eff_sample_size": bounded.mean().square() / bounded.square().mean().clamp(min=1e-300),
    }
    return {name: value.item() for name, value in figures.items()}


def rollout_weights(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    response_mask: Tensor,
    level: str,
    cap: float,
    sampled_mask: Tensor | None = None,
    floor: float = 0.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the weights min(exp(old - rollout), cap) of truncated importance sampling.

    Args:
        level: ``token`` to weight each token by its own ratio, or ``sequence`` to weight all tokens of a response by
            the response's ratio, exp(sum over its tokens of (old - rollout)).
        cap: maximum weight (the paper's C), finite and above 0.
        sampled_mask: mask ``[B, R]`` of all response tokens, used to compute the ratio of a response, or None to use
            ``response_mask``.
        floor: if above 0, weights outside [``floor``, ``cap``] are 0 instead of at most ``cap`` (IcePop).

    Returns:
        Detached weights ``[B, R]``, 0 outside the mask, and metrics as sums over tokens: ``tis_weight``, ``tis_capped``
        (tokens whose ratio is out of bounds) and ``num_tokens``.
    """
    mask = response_mask.bool()
    sampled = mask if sampled_mask is None else sampled_mask.bool()
    log_ratio = torch.where(sampled, (old_logprobs - rollout_logprobs).detach(), 0.0)
    if level == "sequence":
        log_ratio = log_ratio.sum(-1, keepdim=True).expand_as(log_ratio)
    # Clamp only from above, because a vanishing weight is correct.
    ratio = log_ratio.clamp(max=MAX_LOG_RATIO).exp()
    outside = (ratio < floor) | (ratio > cap)
    weights = torch.where(mask, ratio.masked_fill(outside, 0.0) if floor else ratio.clamp(max=cap), 0.0)
    metrics = {
        "tis_weight": weights.sum(),
        "tis_capped": (mask & outside).sum().to(weights.dtype),
        "num_tokens": mask.sum().to(weights.dtype),
    }
    return weights, metrics


def loss_weights(policy_loss: str, weights: Tensor, response_mask: Tensor) -> Tensor:
    """Return factors ``[B, R]`` for the per-token losses of ``policy_loss``.

    The factors equal ``weights``, except for ``gmpo``, which has one ratio per response. For ``gmpo``, each factor is
    the geometric mean of the response's weights, as in veRL.
    """
    if policy_loss != "gmpo":
        return weights
    mask = response_mask.bool()
    # Add 1e-10 as in veRL, because a weight may be 0.
    logs = torch.where(mask, (weights + 1e-10).log(), 0.0)
    mean = logs.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
    return torch.where(mask, mean.exp(), 0.0)


def mean_rollout_weight(
    old_logprobs: Tensor, rollout_logprobs: Tensor, response_mask: Tensor, level: str, cap: float, floor: float = 0.0
) -> float:
    """Return the mean of :func:`rollout_weights` over tokens or responses (``level``), or 1 if the mean is almost 0.

    Policy losses are proportional to the advantages, so dividing the advantages by the mean normalizes the weights.
    """
    weights, _ = rollout_weights(old_logprobs, rollout_logprobs, response_mask, level, cap, floor=floor)
    mask = response_mask.bool()
    if level == "sequence":
        weights, mask = weights.max(-1).values, mask.any(-1)
    mean = (weights.sum() / mask.sum().clamp(min=1)).item()
    return mean if mean > 1e-8 else 1.0


def _divergence(name: str, old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Return the divergence bounded by the rule ``name``, with shape ``[B, R]``, or ``[B, 1]`` for a ``seq_*`` rule."""
    level, _, kind = name.rpartition("_")
    log_ratio = torch.where(mask, (old_logprobs - rollout_logprobs).double(), 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    values = {"k1": -log_ratio, "k2": 0.5 * log_ratio.square(), "k3": log_ratio.expm1() - log_ratio}[kind]
    if level == "token":
        return values
    if level == "seq_max":
        return values.amax(dim=1, keepdim=True)
    total = values.sum(dim=1, keepdim=True)
    return total if level == "seq_sum" else total / mask.sum(dim=1, keepdim=True).clamp(min=1)


def _shares(prefix: str, passed: Tensor, mask: Tensor) -> dict[str, float]:
    rejected = mask & ~passed
    sequences = rejected.any(dim=1)[mask.any(dim=1)]
    return {
        f"{prefix}masked_fraction": rejected[mask].double().mean().item(),
        f"{prefix}seq_masked_fraction": sequences.double().mean().item(),
    }
