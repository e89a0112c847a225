"""How far the rollout engine's policy is from the trainer's, and which tokens are too far to learn from.

Both hold the same weights, but their kernels and precisions differ. Rules and figures are those of veRL's rollout
correction (Liu, Li et al. 2025, "When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference
Mismatch"), the weights of truncated importance sampling those of Yao et al. 2025, "Your Efficient RL Framework Secretly
Brings You Off-Policy RL Training".

Legend: B responses, R response columns. ``old_logprobs [B, R]`` are the trainer's before the update,
``rollout_logprobs [B, R]`` those that the engine sampled with, both in nats. ``response_mask [B, R]`` is true or 1 on
response tokens, and padding may hold anything.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from verl.algorithms.losses.per_token import MAX_LOG_RATIO

Rule = tuple[str, float | None, float]
"""Name, lower bound or None, upper bound; of the ratio p_rollout / p_trainer for k1, of the divergence in nats for the
others, which have no lower bound. The names are a level, ``token``, ``seq_sum``, ``seq_mean`` or ``seq_max``, and
``k1``, ``k2`` or ``k3``."""


def rejection_mask(
    old_logprobs: Tensor, rollout_logprobs: Tensor, response_mask: Tensor, rules: Sequence[Rule]
) -> tuple[Tensor, dict[str, float]]:
    """Which tokens pass all rules, and what share of them does not.

    Args:
        rules: at least one; a rule of a response passes or rejects all of its tokens.

    Returns:
        ``[B, R]`` bool, false outside the mask, and the shares of tokens (``masked_fraction``) and of responses with a
        rejected token (``seq_masked_fraction``), together and by rule.
    """
    mask = response_mask.bool()
    keep = mask
    metrics: dict[str, float] = {}
    for name, lower, upper in rules:
        values = _divergence(name, old_logprobs, rollout_logprobs, mask)
        passed = values <= (math.log(upper) if name.endswith("k1") else upper)
        if lower is not None:  # of k1 alone
            passed = passed & (values >= math.log(lower))
        metrics |= _shares(f"rollout_rs_{name}_", passed, mask)
        keep = keep & passed
    return keep, metrics | _shares("rollout_rs_", keep, mask)


def mismatch_metrics(
    old_logprobs: Tensor, rollout_logprobs: Tensor, response_mask: Tensor, level: str, cap: float
) -> dict[str, float]:
    """Measure the distance of the two policies, and the effect that importance weights at ``level`` would have.

    Args:
        response_mask: with at least one token in each row.
        level: ``token``, or ``sequence`` for the ratio of whole responses.
        cap: weights count in the effective sample size within [1 / cap, cap].

    Returns:
        veRL's figures: ``kl`` and ``k3_kl``, estimates of KL(rollout || trainer) in nats per token; perplexities;
        ``chi2_token`` and ``chi2_seq``, the chi-square divergence by token and by response; mean, largest and
        smallest importance weight, the shares of weights above ``cap`` and below 1 / cap (of tokens, or of responses
        by ``level``), and the effective sample size as a share of the batch, 1 if all weights are alike.
    """
    mask = response_mask.bool()
    # Log-ratios of tokens and of whole responses.
    old, rollout = (torch.where(mask, t.double(), 0.0) for t in (old_logprobs, rollout_logprobs))
    lengths, log_ratio = mask.sum(dim=1), old - rollout
    tokens = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    whole = log_ratio.sum(dim=1).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    # Log-perplexities of each response.
    log_ppl, rollout_log_ppl = -old.sum(dim=1) / lengths, -rollout.sum(dim=1) / lengths
    gap = log_ppl - rollout_log_ppl
    # Importance weights at ``level``, one a token, and the ratios that the shares count.
    weights = (tokens if level == "token" else whole[:, None].expand_as(tokens)).exp()[mask]
    ratios = weights if level == "token" else whole.exp()
    low, high = sorted((1 / cap, cap))
    bounded = weights.clamp(low, high)
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
        "rollout_is_eff_sample_size": bounded.mean().square() / bounded.square().mean(),
    }
    return {name: value.item() for name, value in figures.items()}


def rollout_weights(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    response_mask: Tensor,
    level: str,
    cap: float,
    sampled_mask: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Weights min(exp(old - rollout), cap) by which the per-token policy losses are multiplied.

    ``token``: each token's own ratio. ``sequence``: the ratio of the whole response, exp(sum over its tokens of
    (old - rollout)), on all of its tokens. Before the cap, a ratio is clamped to exp(``MAX_LOG_RATIO``).

    Args:
        level: ``token`` or ``sequence``.
        cap: largest weight, finite and above 0; the paper's C.
        sampled_mask: ``[B, R]``, all tokens of the responses, if ``response_mask`` leaves some out; the ratio of a
            whole response is over these.

    Returns:
        Weights ``[B, R]``, detached, 0 outside the mask, and metrics as sums over tokens: ``tis_weight``,
        ``tis_capped`` (tokens whose ratio is above the cap), ``num_tokens``.
    """
    mask = response_mask.bool()
    sampled = mask if sampled_mask is None else sampled_mask.bool()
    log_ratio = torch.where(sampled, (old_logprobs - rollout_logprobs).detach(), 0.0)
    if level == "sequence":
        log_ratio = log_ratio.sum(-1, keepdim=True).expand_as(log_ratio)
    # Clamped from above only: a vanishing weight is correct, and no gradient passes here.
    ratio = log_ratio.clamp(max=MAX_LOG_RATIO).exp()
    weights = torch.where(mask, ratio.clamp(max=cap), 0.0)
    metrics = {
        "tis_weight": weights.sum(),
        "tis_capped": (mask & (ratio > cap)).sum().to(weights.dtype),
        "num_tokens": mask.sum().to(weights.dtype),
    }
    return weights, metrics


def loss_weights(policy_loss: str, weights: Tensor, response_mask: Tensor) -> Tensor:
    """Return the factors of the per-token losses of ``policy_loss``, ``[B, R]``.

    :func:`rollout_weights` themselves; with ``gmpo``, whose ratio is one of responses, their geometric mean over the
    tokens of the response, as in veRL.
    """
    if policy_loss != "gmpo":
        return weights
    mask = response_mask.bool()
    # A weight may have vanished; 1e-10 as in veRL.
    logs = torch.where(mask, (weights + 1e-10).log(), 0.0)
    mean = logs.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
    return torch.where(mask, mean.exp(), 0.0)


def mean_rollout_weight(
    old_logprobs: Tensor, rollout_logprobs: Tensor, response_mask: Tensor, level: str, cap: float
) -> float:
    """Mean of :func:`rollout_weights` over the batch, of tokens or of responses by ``level``; 1 if it vanishes.

    Weights divided by it have a mean of 1. Policy losses are proportional to advantages, so advantages divided by it
    give the same losses.
    """
    weights, _ = rollout_weights(old_logprobs, rollout_logprobs, response_mask, level, cap)
    mask = response_mask.bool()
    if level == "sequence":
        weights, mask = weights.max(-1).values, mask.any(-1)
    mean = (weights.sum() / mask.sum().clamp(min=1)).item()
    return mean if mean > 1e-8 else 1.0


def _divergence(name: str, old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Return the divergence that the rule ``name`` bounds, ``[B, R]``, or ``[B, 1]`` for a rule of responses."""
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
