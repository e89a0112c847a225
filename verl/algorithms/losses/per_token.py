"""Per-token policy losses, and the critic's loss.

Shapes: B responses, R response columns. Ratio: r = exp(logprobs - old_logprobs). Common arguments, all ``[B, R]``:

- ``logprobs``: log-probabilities (nats) of the response tokens under the policy being trained
- ``old_logprobs``: log-probabilities (nats) under the policy at the start of the step
- ``advantages``: advantages A
- ``response_mask``: true or 1 on the response tokens to learn from; values outside it are ignored

Policy losses return losses ``[B, R]``, which are 0 outside the mask, and detached metrics. Metrics are sums over
tokens, so they can be added up across micro-batches and ranks: ``ppo_kl`` (k1 estimate old - new, Schulman 2020),
``num_tokens`` and, with clipping, ``pg_clipfrac`` (clipped tokens). Options that are out of range raise ``ValueError``.
"""

import math

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Bound on the absolute log-ratio that keeps exp finite. Beyond the bound, the gradient is 0."""

BINARY_KL_EPS = 1e-8
"""Constant added to the combined probability of all other tokens, as in veRL, to keep its ratio finite."""

Losses = tuple[Tensor, dict[str, Tensor]]


def ppo_clip_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    clip_low: float,
    clip_high: float,
    clip_ratio_c: float | None = None,
) -> Losses:
    """Compute the clipped surrogate of PPO (arXiv 1707.06347): -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A).

    Dual clip (arXiv 1912.09729) limits the loss to -clip_ratio_c A where A < 0, because plain clipping leaves it
    unbounded at large ratios. The metric ``pg_clipfrac_lower`` counts the tokens at the limit.

    Args:
        clip_low: clip range below 1, in [0, 1]; the lower bound of the ratio is 1 - clip_low.
        clip_high: clip range above 1, nonnegative; the upper bound of the ratio is 1 + clip_high.
        clip_ratio_c: ratio at which the loss is limited where A < 0, finite and above 1, or None to disable dual clip.
    """
    if clip_ratio_c is not None and not 1 < clip_ratio_c < math.inf:
        raise ValueError(f"clip_ratio_c={clip_ratio_c}: must be finite and above 1, or None for no dual clip")
    mask, log_ratio, advantages = _masked_tokens(logprobs, old_logprobs, advantages, response_mask)
    losses, clipped = _clipped_surrogate(log_ratio, advantages, clip_low, clip_high)
    if clip_ratio_c is None:
        return losses, _token_sums(log_ratio, mask, pg_clipfrac=clipped)
    bound = -clip_ratio_c * advantages
    bounded = (advantages < 0) & (losses > bound)
    metrics = _token_sums(log_ratio, mask, pg_clipfrac=clipped, pg_clipfrac_lower=bounded)
    return torch.where(bounded, bound, losses), metrics


def gspo_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, response_mask: Tensor, clip_low: float, clip_high: float
) -> Losses:
    """Compute the GSPO-token loss (arXiv 2507.18071): -min(s A, clip(s, 1 - clip_low, 1 + clip_high) A).

    The ratio of response i is s_i = exp(mean over its tokens of (logprobs - old_logprobs)). Token t uses s_{i,t} =
    sg[s_i] exp(logp_t - sg[logp_t]), where sg stops the gradient. The value of s_{i,t} is s_i, and its gradient is s_i
    times the gradient of logp_t, so all tokens of a response have equal weight. If all tokens of a response have the
    same advantage, ``sequence_mean`` of these losses has the value and gradient of the paper's sequence objective.

    Clipping acts on whole responses. The mean log-ratio of a response varies far less than a token's log-ratio, so the
    paper's clip ranges are about 3e-4 instead of 0.2. ``clip_low`` is in [0, 1], and ``clip_high`` is nonnegative.
    """
    mask, log_ratio, advantages = _masked_tokens(logprobs.detach(), old_logprobs, advantages, response_mask)
    # 1. Compute log s_i.
    sequence_log_ratio = log_ratio.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
    # 2. Compute log s_{i,t}. The difference in parentheses is exactly 0 and carries the gradient.
    logprobs = torch.where(mask, logprobs, 0.0)
    token_log_ratio = sequence_log_ratio + (logprobs - logprobs.detach())
    losses, clipped = _clipped_surrogate(token_log_ratio, advantages, clip_low, clip_high)
    return losses, _token_sums(log_ratio, mask, pg_clipfrac=clipped)


def cispo_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, response_mask: Tensor, clip_low: float, clip_high: float
) -> Losses:
    """Compute the CISPO loss (MiniMax-M1, arXiv 2506.13585): -sg[clip(r, 1 - clip_low, 1 + clip_high)] A logprobs.

    sg stops the gradient, so clipping bounds the weight of a token's gradient but never removes it. Only the gradient
    of the loss is meaningful, not its value. Where the ratio is not clipped, this gradient equals that of -r A.
    ``clip_low`` is in [0, 1], where 1 means no lower bound, as in the paper. ``clip_high`` is nonnegative.
    """
    _check_clip_ranges(clip_low, clip_high)
    mask, log_ratio, advantages = _masked_tokens(logprobs.detach(), old_logprobs, advantages, response_mask)
    ratio = _probability_ratio(log_ratio)
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    losses = -weight * advantages * torch.where(mask, logprobs, 0.0)
    return losses, _token_sums(log_ratio, mask, pg_clipfrac=weight != ratio)


def gmpo_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, response_mask: Tensor, clip_low: float, clip_high: float
) -> Losses:
    """Compute the GMPO loss (arXiv 2507.20673): -A s, where s is the geometric mean of the clipped ratios.

    log s = mean over tokens of sign(A) min(sign(A) d, sign(A) clip(d, -clip_low, clip_high)) with d = logprobs -
    old_logprobs: log-ratios are clipped per token, on the side that would increase the objective. A is the mean of the
    response's advantages. ``sequence_mean`` of these losses is the paper's objective.

    ``clip_low`` and ``clip_high`` are nonnegative bounds on log-ratios; the paper uses 0.4 for both.
    """
    _check_clip_ranges(clip_low, clip_high, largest=math.inf)
    mask, log_ratio, advantages = _masked_tokens(logprobs, old_logprobs, advantages, response_mask)
    length = mask.sum(-1, keepdim=True).clamp(min=1)
    advantage = advantages.sum(-1, keepdim=True) / length
    # Compute log s.
    clamped = log_ratio.clamp(-clip_low, clip_high)
    clipped = torch.where(advantage > 0, log_ratio > clamped, log_ratio < clamped) & (advantage != 0)
    log_s = torch.where(clipped, clamped, log_ratio).sum(-1, keepdim=True) / length
    losses = torch.where(mask, -advantage * _probability_ratio(log_s), 0.0)
    return losses, _token_sums(log_ratio, mask, pg_clipfrac=clipped)


def gpg_loss(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, response_mask: Tensor) -> Losses:
    """Compute ``-A * logprobs``, the loss used by GPG (arXiv 2504.02546) and REINFORCE.

    The loss has no probability ratio, so later mini-batches of a step are trained off policy without correction. Only
    the gradient of the loss is meaningful, not its value. ``old_logprobs`` is used only for the metrics.
    """
    mask, log_ratio, advantages = _masked_tokens(logprobs, old_logprobs, advantages, response_mask)
    return -advantages * torch.where(mask, logprobs, 0.0), _token_sums(log_ratio, mask)


def dro_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, response_mask: Tensor, dro_beta: float
) -> Losses:
    """Compute the DRO loss (arXiv 2405.19107), as in veRL: -A logprobs + dro_beta / 2 (log r)^2.

    Instead of clipping, DRO penalises the squared log-ratio with weight ``dro_beta`` > 0.
    """
    if not dro_beta > 0:
        raise ValueError(f"dro_beta={dro_beta}: must be above 0")
    mask, log_ratio, advantages = _masked_tokens(logprobs, old_logprobs, advantages, response_mask)
    losses = 0.5 * dro_beta * log_ratio.square() - advantages * torch.where(mask, logprobs, 0.0)
    return losses, _token_sums(log_ratio, mask)


def dppo_tv_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    clip_low: float,
    clip_high: float,
    clip_ratio_c: float | None = None,
) -> Losses:
    """Compute the DPPO-TV loss (arXiv 2602.04879) as in veRL: -stop_gradient(min(r, clip_ratio_c)) * A * logprobs.

    DPPO does not clip the ratio. It excludes a token from the loss once the token's probability p has moved too far in
    the direction of its advantage: p - p_old > clip_high where A > 0, and p - p_old < -clip_low elsewhere. Only the
    gradient of the loss is meaningful, not its value. ``pg_clipfrac`` counts the excluded tokens.

    Args:
        clip_low: bound on the decrease of the probability, in [0, 1]; 0.15 in veRL's example.
        clip_high: bound on the increase of the probability, nonnegative; 0.15 in veRL's example.
        clip_ratio_c: bound on the weight r, or None for no bound. ``pg_clipfrac_lower`` counts the tokens beyond it.
    """
    _check_clip_ranges(clip_low, clip_high)
    masked = _masked_tokens(logprobs.detach(), old_logprobs, advantages, response_mask)
    change = torch.sub(*_probabilities(logprobs, old_logprobs, masked[0]))
    kept = torch.where(masked[2] > 0, change <= clip_high, change >= -clip_low)
    return _masked_policy_gradient(logprobs, *masked, kept, clip_ratio_c)


def dppo_kl_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    clip_low: float,
    clip_high: float,
    clip_ratio_c: float | None = None,
) -> Losses:
    """Compute the DPPO-KL loss (arXiv 2602.04879): :func:`dppo_tv_loss` with tokens excluded by their KL divergence.

    The divergence treats all other tokens as a single event: D = p_old log(p_old / p) + (1 - p_old) log((1 - p_old +
    1e-8) / (1 - p + 1e-8)). A token is excluded if D > clip_high, A > 0 and p > p_old, or if D > clip_low, A <= 0 and p
    < p_old. Both bounds are in nats, and ``clip_low`` is in [0, 1]. In veRL's example, both bounds are 0.05.
    """
    _check_clip_ranges(clip_low, clip_high)
    mask, log_ratio, advantages = _masked_tokens(logprobs.detach(), old_logprobs, advantages, response_mask)
    p, p_old = _probabilities(logprobs, old_logprobs, mask)
    others = ((1 - p_old + BINARY_KL_EPS) / (1 - p + BINARY_KL_EPS)).log()
    divergence = (1 - p_old) * others - p_old * log_ratio
    rising, falling = (divergence <= clip_high) | (p <= p_old), (divergence <= clip_low) | (p >= p_old)
    kept = torch.where(advantages > 0, rising, falling)
    return _masked_policy_gradient(logprobs, mask, log_ratio, advantages, kept, clip_ratio_c)


def sapo_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, response_mask: Tensor, tau_pos: float, tau_neg: float
) -> Losses:
    """Compute the SAPO loss (soft adaptive policy optimisation, arXiv 2511.20347): -A sigmoid(tau (r - 1)) 4 / tau.

    A soft gate replaces clipping. The slope of the gate is 1 at r = 1 and decays on both sides, faster for larger tau.

    Args:
        tau_pos: positive temperature of the gate where A > 0; 1 in the paper.
        tau_neg: positive temperature elsewhere; 1.05 in the paper, because negative updates are less stable.
    """
    for name, tau in (("tau_pos", tau_pos), ("tau_neg", tau_neg)):
        if not tau > 0:
            raise ValueError(f"{name}={tau}: must be above 0")
    mask, log_ratio, advantages = _masked_tokens(logprobs, old_logprobs, advantages, response_mask)
    ratio = _probability_ratio(log_ratio)
    taus = torch.where(advantages > 0, tau_pos, tau_neg).to(ratio.dtype)
    gate = torch.sigmoid(taus * (ratio - 1)) * 4 / taus
    return -advantages * gate, _token_sums(log_ratio, mask)


def clip_cov_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    clip_low: float,
    clip_high: float,
    clip_cov_ratio: float,
    clip_cov_lb: float,
    clip_cov_ub: float,
) -> Losses:
    """Compute the Clip-Cov loss (arXiv 2505.22617): the PPO loss with a few random high-covariance tokens excluded.

    Entropy collapses because likely tokens with high advantages keep becoming more likely. Clip-Cov excludes some of
    these tokens from the loss, whereas KL-Cov (:func:`kl_cov_loss`) penalises them. As in veRL, both losses select
    tokens separately in each micro-batch.

    Candidates are unclipped tokens whose covariance (:func:`covariances`) is between the two bounds. The number of
    candidates to draw is ``clip_cov_ratio`` times the number of tokens, but at least 1. The random keys depend only on
    old log-probabilities and advantages, not on padding or kernel rounding. ``pg_clipfrac`` counts the drawn tokens.

    Args:
        clip_low: clip range below 1, in [0, 1]; the lower bound of the ratio is 1 - clip_low.
        clip_high: clip range above 1, nonnegative; the upper bound of the ratio is 1 + clip_high.
        clip_cov_ratio: positive fraction of tokens to draw; 2e-4 in the paper.
        clip_cov_lb: lower bound on the covariance of candidates; 1 in the paper.
        clip_cov_ub: upper bound on the covariance of candidates; 5 in the paper.
    """
    mask, log_ratio, advantages = _masked_tokens(logprobs, old_logprobs, advantages, response_mask)
    losses, clipped = _clipped_surrogate(log_ratio, advantages, clip_low, clip_high)
    # 1. Select the candidates.
    covariance = covariances(logprobs, advantages, mask)
    candidates = mask & ~clipped & (covariance > clip_cov_lb) & (covariance < clip_cov_ub)
    # 2. Draw the candidates with the smallest random keys, without waiting for the device.
    keys = _random_keys(mask, old_logprobs, advantages).where(candidates, torch.iinfo(torch.int64).max)
    drawn = candidates & _smallest(keys, _share_of(mask, clip_cov_ratio))
    return torch.where(drawn, 0.0, losses), _token_sums(log_ratio, mask, pg_clipfrac=drawn)


def kl_cov_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    kl_cov_ratio: float,
    ppo_kl_coef: float,
) -> Losses:
    """Compute the KL-Cov loss (arXiv 2505.22617): -r A, plus ppo_kl_coef |log r| where the covariance is largest.

    Args:
        kl_cov_ratio: fraction of tokens to penalise (at least one token), in (0, 1]. The paper uses 2e-4 for 32B models
            and 2e-3 for 7B models.
        ppo_kl_coef: weight of the penalty; 1 in the paper.
    """
    mask, log_ratio, advantages = _masked_tokens(logprobs, old_logprobs, advantages, response_mask)
    losses = -_probability_ratio(log_ratio) * advantages
    covariance = torch.where(mask, covariances(logprobs, advantages, mask), -torch.inf)
    largest = mask & _smallest(-covariance, _share_of(mask, kl_cov_ratio))
    losses = losses + torch.where(largest, ppo_kl_coef * log_ratio.abs(), 0.0)
    return losses, _token_sums(log_ratio, mask)


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, response_mask: Tensor, clip_range: float) -> Losses:
    """Compute the critic loss (arXiv 1707.06347, eq. 9), clipped as in OpenAI baselines' ``ppo2``.

    The loss is 0.5 max((v - G)^2, (clip(v, v_old - clip_range, v_old + clip_range) - G)^2). A value that has moved more
    than ``clip_range`` towards its return G has no gradient. A value that has moved away from G still has a gradient.

    Args:
        values: values v ``[B, R]`` of the critic being trained, in units of reward.
        old_values: values v_old ``[B, R]`` of the critic at the start of the step.
        returns: returns G ``[B, R]``.
        clip_range: positive clip range in units of reward, or infinity to disable clipping.

    Returns:
        Losses ``[B, R]``, 0 outside the mask, and token sums: ``vf_clipfrac`` (clipped tokens) and ``num_tokens``.
    """
    if not clip_range > 0:
        raise ValueError(f"clip_range={clip_range}: must be above 0; infinity for no clip")
    mask = response_mask.bool()
    values, old_values, returns = (torch.where(mask, t, 0.0) for t in (values, old_values, returns))
    # Clamp v rather than v - v_old, so that within the bounds the clipped value is exactly v.
    clipped_values = values.clamp(old_values - clip_range, old_values + clip_range)
    plain, clipped = (0.5 * (v - returns).square() for v in (values, clipped_values))
    counts = {"vf_clipfrac": clipped > plain, "num_tokens": mask}
    return torch.maximum(plain, clipped), {name: tokens.sum().to(plain.dtype) for name, tokens in counts.items()}


def covariances(logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """Return (A - mean of A) (logprobs - mean of logprobs), ``[B, R]``, with means over the mask and 0 outside it."""
    count = mask.sum().clamp(min=1)
    values = [torch.where(mask, t.detach(), 0.0) for t in (advantages, logprobs)]
    centred_advantages, centred_logprobs = (t - t.sum() / count for t in values)
    return torch.where(mask, centred_advantages * centred_logprobs, 0.0)


def _share_of(mask: Tensor, ratio: float) -> Tensor:
    """Return ``ratio`` times the number of tokens in the mask as a device tensor, rounded down but at least 1."""
    return (mask.sum() * torch.tensor(ratio, dtype=torch.float64)).floor().clamp(min=1)


def _smallest(keys: Tensor, count: Tensor) -> Tensor:
    """Return a boolean mask of the ``count`` smallest elements of ``keys``."""
    order = keys.flatten().argsort(stable=True)
    ranks = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return (ranks < count).view_as(keys)


def _random_keys(mask: Tensor, *contents: Tensor) -> Tensor:
    """Return nonnegative pseudo-random keys [B, R] int64, seeded with the float32 values of ``contents`` in the mask.

    Tokens are numbered within the mask, so padding has no effect. The seed is a sum of integers, so the order of
    summation does not affect it.
    """
    indices = mask.flatten().cumsum(0).view_as(mask)
    hashes = indices
    for values in contents:
        hashes = _hashed(hashes ^ values.detach().float().contiguous().view(torch.int32))
    return _hashed(hashes.where(mask, 0).sum() + indices)


def _hashed(values: Tensor) -> Tensor:
    """Hash each int64 in ``values`` to [0, 2^63) with the multiplications and shifts of SplitMix64."""
    for shift, factor in ((30, 0x3F58476D1CE4E5B9), (27, 0x14D049BB133111EB), (31, 1)):
        values = (values ^ (values >> shift)) * factor & torch.iinfo(torch.int64).max
    return values


def _masked_tokens(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, response_mask: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the boolean mask, log-ratios and advantages, each of shape ``[B, R]`` and 0 outside the mask."""
    mask = response_mask.bool()
    # Mask before exp, because infinite or NaN padding would reach the gradient as 0 * inf.
    return mask, torch.where(mask, logprobs - old_logprobs, 0.0), torch.where(mask, advantages, 0.0)


def _probabilities(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return detached probabilities under the current and the old policy, both ``[B, R]`` and 1 outside the mask."""
    return torch.where(mask, logprobs.detach(), 0.0).exp(), torch.where(mask, old_logprobs, 0.0).exp()


def _masked_policy_gradient(
    logprobs: Tensor, mask: Tensor, log_ratio: Tensor, advantages: Tensor, kept: Tensor, most: float | None
) -> Losses:
    """Return the losses -sg[min(r, most)] A logprobs, zeroed outside the mask ``kept [B, R]``, and DPPO's metrics."""
    ratio, most = _probability_ratio(log_ratio), math.inf if most is None else most
    kept = kept & mask
    losses = -ratio.clamp(max=most) * advantages * torch.where(kept, logprobs, 0.0)
    return losses, _token_sums(log_ratio, mask, pg_clipfrac=mask & ~kept, pg_clipfrac_lower=kept & (ratio > most))


def _probability_ratio(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _check_clip_ranges(clip_low: float, clip_high: float, largest: float = 1.0) -> None:
    if not 0 <= clip_low <= largest:
        raise ValueError(f"clip_low={clip_low}: must be at least 0 and at most {largest}")
    if not clip_high >= 0:
        raise ValueError(f"clip_high={clip_high}: must be at least 0")


def _clipped_surrogate(
    log_ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """Return -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) for r = exp(log_ratio), and a mask of clipped tokens."""
    _check_clip_ranges(clip_low, clip_high)
    ratio = _probability_ratio(log_ratio)
    plain = -ratio * advantages
    clipped = -ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    return torch.maximum(plain, clipped), clipped > plain


def _token_sums(log_ratio: Tensor, mask: Tensor, **masks: Tensor) -> dict[str, Tensor]:
    """Return the metrics ``ppo_kl`` and ``num_tokens`` of a loss, and the number of tokens in each of ``masks``."""
    counts = {name: tokens.sum().to(log_ratio.dtype) for name, tokens in masks.items()}
    return counts | {"ppo_kl": -log_ratio.detach().sum(), "num_tokens": mask.sum().to(log_ratio.dtype)}
