"""How far the rollout engine's policy is from the trainer's, and which tokens are too far to learn from.

Both hold the same weights, but their kernels and precisions differ. Rules and figures are those of veRL's rollout
correction (Liu, Li et al. 2025, "When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference
Mismatch"). The weights of truncated importance sampling are in ``losses/importance.py``.

Legend: B responses, R response columns. ``old_logprobs [B, R]`` are the trainer's before the update,
``rollout_logprobs [B, R]`` those that the engine sampled with, both in nats.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from verl.algorithms.losses.tokens import MAX_LOG_RATIO

Rule = tuple[str, float | None, float]
"""Name, lower bound or None, upper bound; of the ratio p_rollout / p_trainer for k1, of the divergence in nats for the
others, which have no lower bound. The names are a level, ``token``, ``seq_sum``, ``seq_mean`` or ``seq_max``, and
``k1``, ``k2`` or ``k3``."""


def rejection_mask(
    old_logprobs: Tensor, rollout_logprobs: Tensor, response_mask: Tensor, rules: Sequence[Rule]
) -> tuple[Tensor, dict[str, float]]:
    """Which tokens pass all rules, and what share of them does not.

    Args:
        response_mask: ``[B, R]``, true or 1 on response tokens; padding may hold anything.
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
    """The distance of the two policies, and what importance weights at ``level`` would make of the batch.

    Args:
        response_mask: ``[B, R]``, true or 1 on response tokens, at least one in each row; padding may hold anything.
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


def _divergence(name: str, old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> Tensor:
    """What the rule ``name`` compares with its bounds, ``[B, R]``, or ``[B, 1]`` if it is one of responses."""
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
