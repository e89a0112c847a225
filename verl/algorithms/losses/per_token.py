"""The policy losses and the critic's loss, per token.

Common to all policy losses: B responses, R response columns, r = exp(logprobs - old_logprobs), and ``[B, R]`` each

- ``logprobs``, log-probabilities (nats) of the response tokens under the policy being trained;
- ``old_logprobs``, the same under the policy at the start of the step;
- ``advantages``, A;
- ``response_mask``, true or 1 on response tokens; padding may hold anything.

Each returns losses ``[B, R]``, 0 outside the mask, and detached metrics as sums over tokens, so that they can be added
over micro-batches and ranks: ``ppo_kl`` (k1 estimate old - new, Schulman 2020), ``num_tokens`` and, if it clips,
``pg_clipfrac`` (tokens on which clipping is active). Each raises ``ValueError`` for an option that is out of range.
"""

import math

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log ratios are clamped to plus or minus this, so that exp stays finite; the gradient is 0 beyond it."""

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

    Dual clip (arXiv 1912.09729) bounds the loss where A < 0, which plain clipping does not bound at large ratios: there
    it is min(that loss, -clip_ratio_c A), with no gradient at the bound.

    Args:
        clip_low: the ratio is clipped below at 1 - clip_low, in [0, 1].
        clip_high: the ratio is clipped above at 1 + clip_high, at least 0.
        clip_ratio_c: the ratio that bounds the loss where A < 0, finite and above 1; ``None`` for no dual clip, which
            logs ``pg_clipfrac_lower`` (tokens on which its bound is active).
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
    """GSPO-token (arXiv 2507.18071): -min(s A, clip(s, 1 - clip_low, 1 + clip_high) A) with one ratio per response.

    The ratio of response i is s_i = exp(mean over its tokens of (logprobs - old_logprobs)). Token t uses
    s_{i,t} = sg[s_i] exp(logp_t - sg[logp_t]), where sg stops the gradient: its value is s_i, and its gradient is s_i
    times that of logp_t, so every token of a response has the same weight. With the same advantage on all tokens of a
    response, ``sequence_mean`` of these losses has the value and gradient of the paper's sequence objective.

    Clipping acts on whole responses. A mean over tokens varies far less than one token's ratio: the paper's ranges are
    about 3e-4, not 0.2. ``clip_low`` is in [0, 1], ``clip_high`` at least 0.
    """
    mask, log_ratio, advantages = _masked_tokens(logprobs.detach(), old_logprobs, advantages, response_mask)
    # log s_i.
    sequence_log_ratio = log_ratio.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
    # log s_{i,t}: the difference in brackets is exactly 0 and carries the gradient.
    logprobs = torch.where(mask, logprobs, 0.0)
    token_log_ratio = sequence_log_ratio + (logprobs - logprobs.detach())
    losses, clipped = _clipped_surrogate(token_log_ratio, advantages, clip_low, clip_high)
    return losses, _token_sums(log_ratio, mask, pg_clipfrac=clipped)


def cispo_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, response_mask: Tensor, clip_low: float, clip_high: float
) -> Losses:
    """CISPO (MiniMax-M1, arXiv 2506.13585): -sg[clip(r, 1 - clip_low, 1 + clip_high)] A logprobs.

    sg stops the gradient: clipping bounds the weight of a token's gradient but never removes it, whatever the sign of
    A. Only the gradient of the loss is meaningful, not its value; it is that of -r A wherever the weight is not
    clipped. ``clip_low`` is in [0, 1], and 1 means no lower bound, as in the paper; ``clip_high`` is at least 0.
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
    """GMPO (arXiv 2507.20673): -A s on every token of a response, with s the geometric mean of its clipped ratios.

    log s = mean over tokens of sign(A) min(sign(A) d, sign(A) clip(d, -clip_low, clip_high)), d = logprobs -
    old_logprobs: each token's log-ratio is clipped by itself, on the side where the objective would gain from more.
    A is the mean of the response's advantages. ``sequence_mean`` of these losses is the paper's objective.

    ``clip_low`` and ``clip_high`` bound log-ratios and are at least 0; 0.4 in the paper.
    """
    _check_clip_ranges(clip_low, clip_high, largest=math.inf)
    mask, log_ratio, advantages = _masked_tokens(logprobs, old_logprobs, advantages, response_mask)
    length = mask.sum(-1, keepdim=True).clamp(min=1)
    advantage = advantages.sum(-1, keepdim=True) / length
    # log s.
    clamped = log_ratio.clamp(-clip_low, clip_high)
    clipped = torch.where(advantage > 0, log_ratio > clamped, log_ratio < clamped) & (advantage != 0)
    log_s = torch.where(clipped, clamped, log_ratio).sum(-1, keepdim=True) / length
    losses = torch.where(mask, -advantage * _probability_ratio(log_s), 0.0)
    return losses, _token_sums(log_ratio, mask, pg_clipfrac=clipped)


def gpg_loss(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, response_mask: Tensor) -> Losses:
    """Compute -A logprobs, of GPG (arXiv 2504.02546) and REINFORCE: no ratio, so later mini-batches are off policy.

    Nothing is clipped. Only the gradient of the loss is meaningful, not its value; ``old_logprobs`` is for the metrics.
    """
    mask, log_ratio, advantages = _masked_tokens(logprobs, old_logprobs, advantages, response_mask)
    return -advantages * torch.where(mask, logprobs, 0.0), _token_sums(log_ratio, mask)


def sapo_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, response_mask: Tensor, tau_pos: float, tau_neg: float
) -> Losses:
    """Soft adaptive policy optimisation (SAPO, arXiv 2511.20347): -A sigmoid(tau (r - 1)) 4 / tau.

    A soft gate in place of clipping: at r = 1 its slope is 1, as that of r itself, and it fades on both sides the
    faster the larger tau.

    Args:
        tau_pos: temperature of the gate where A > 0, above 0; 1 in the paper.
        tau_neg: temperature elsewhere, above 0; 1.05 in the paper, as negative updates are less stable.
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
    """Clip-Cov (arXiv 2505.22617): PPO's clipped surrogate, with loss 0 on a few random tokens of large covariance.

    Raising the probability of tokens that are likely and good already is what lowers the entropy: Clip-Cov takes a few
    of them out of the loss, :func:`kl_cov_loss` holds them back. As in veRL, both compare the tokens of a micro-batch.

    Candidates are the tokens that the clip leaves alone and whose :func:`covariances` are between the two bounds;
    ``clip_cov_ratio`` times the number of tokens of them are drawn, at least one. The draw depends on the old
    log-probabilities and advantages of the micro-batch alone: padding, rows of which nothing is learned and the
    rounding of a kernel leave it as it is. ``pg_clipfrac`` counts the tokens that were drawn.

    Args:
        clip_low: the ratio is clipped below at 1 - clip_low, in [0, 1].
        clip_high: the ratio is clipped above at 1 + clip_high, at least 0.
        clip_cov_ratio: share of tokens that are drawn, above 0; 2e-4 in the paper.
        clip_cov_lb: covariances of candidates are above this; 1 in the paper.
        clip_cov_ub: and below this; 5 in the paper.
    """
    mask, log_ratio, advantages = _masked_tokens(logprobs, old_logprobs, advantages, response_mask)
    losses, clipped = _clipped_surrogate(log_ratio, advantages, clip_low, clip_high)
    # 1. The candidates.
    covariance = covariances(logprobs, advantages, mask)
    candidates = mask & ~clipped & (covariance > clip_cov_lb) & (covariance < clip_cov_ub)
    # 2. A draw among them: of keys that follow from what the micro-batch holds, the smallest. All on the device.
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
    """KL-Cov (arXiv 2505.22617): -r A, plus ppo_kl_coef |log r| on the tokens of largest covariance, without a clip.

    Args:
        kl_cov_ratio: share of tokens that are penalised, at least one, in (0, 1]; 2e-4 in the paper for 32B, 2e-3
            for 7B.
        ppo_kl_coef: weight of the penalty; 1 in the paper.
    """
    mask, log_ratio, advantages = _masked_tokens(logprobs, old_logprobs, advantages, response_mask)
    losses = -_probability_ratio(log_ratio) * advantages
    covariance = torch.where(mask, covariances(logprobs, advantages, mask), -torch.inf)
    largest = mask & _smallest(-covariance, _share_of(mask, kl_cov_ratio))
    losses = losses + torch.where(largest, ppo_kl_coef * log_ratio.abs(), 0.0)
    return losses, _token_sums(log_ratio, mask)


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, response_mask: Tensor, clip_range: float) -> Losses:
    """Compute the critic's loss (arXiv 1707.06347, eq. 9), clipped as in OpenAI baselines' ``ppo2``.

    0.5 max((v - G)^2, (clip(v, v_old - clip_range, v_old + clip_range) - G)^2), 0 outside the mask. As the larger of
    the two counts, a value that has moved further than ``clip_range`` towards its return G gets no gradient, and one
    that has moved away from it keeps its full gradient.

    Args:
        values: v, ``[B, R]``, in units of reward, under the critic being trained.
        old_values: v_old, ``[B, R]``, the same under the critic at the start of the step.
        returns: G, ``[B, R]``.
        clip_range: in units of reward, above 0; infinity for no clip.

    The metrics are sums over tokens: ``vf_clipfrac`` (tokens on which clipping is active) and ``num_tokens``.
    """
    if not clip_range > 0:
        raise ValueError(f"clip_range={clip_range}: must be above 0; infinity for no clip")
    mask = response_mask.bool()
    values, old_values, returns = (torch.where(mask, t, 0.0) for t in (values, old_values, returns))
    # Clamping v itself, not its difference from v_old: within the bounds the clipped value is v to the last bit.
    clipped_values = values.clamp(old_values - clip_range, old_values + clip_range)
    plain, clipped = (0.5 * (v - returns).square() for v in (values, clipped_values))
    counts = {"vf_clipfrac": clipped > plain, "num_tokens": mask}
    return torch.maximum(plain, clipped), {name: tokens.sum().to(plain.dtype) for name, tokens in counts.items()}


def covariances(logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """Return (A - mean of A) (logprobs - mean of logprobs), ``[B, R]``, with means over the mask; 0 outside it."""
    count = mask.sum().clamp(min=1)
    values = [torch.where(mask, t.detach(), 0.0) for t in (advantages, logprobs)]
    first, second = (t - t.sum() / count for t in values)
    return torch.where(mask, first * second, 0.0)


def _share_of(mask: Tensor, ratio: float) -> Tensor:
    """``ratio`` of the number of tokens in the mask, rounded down, at least 1; a tensor, which nobody waits for."""
    return (mask.sum() * torch.tensor(ratio, dtype=torch.float64)).floor().clamp(min=1)


def _smallest(keys: Tensor, count: Tensor) -> Tensor:
    """Bool in the shape of ``keys [B, R]``, true at the ``count`` smallest of all."""
    order = keys.flatten().argsort(stable=True)
    ranks = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return (ranks < count).view_as(keys)


def _random_keys(mask: Tensor, *contents: Tensor) -> Tensor:
    """Numbers [B, R] int64, at least 0, for the tokens of the mask: random, and decided by what these hold in float32.

    A token's place among those of the mask is what counts, so padding does not. Sums of integers do not depend on the
    order in which a device adds.
    """
    places = mask.flatten().cumsum(0).view_as(mask)
    held = places
    for values in contents:
        held = _scrambled(held ^ values.detach().float().contiguous().view(torch.int32))
    return _scrambled(held.where(mask, 0).sum() + places)


def _scrambled(values: Tensor) -> Tensor:
    """Each of ``values``, int64, at random in [0, 2^63): multiplications and shifts as in SplitMix64."""
    for shift, factor in ((30, 0x3F58476D1CE4E5B9), (27, 0x14D049BB133111EB), (31, 1)):
        values = (values ^ (values >> shift)) * factor & torch.iinfo(torch.int64).max
    return values


def _masked_tokens(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, response_mask: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the boolean mask, log ratios ``logprobs - old_logprobs`` and advantages, 0 outside; all ``[B, R]``."""
    mask = response_mask.bool()
    # Masked before exp: an infinite or NaN padding value would reach the gradient as 0 * inf.
    return mask, torch.where(mask, logprobs - old_logprobs, 0.0), torch.where(mask, advantages, 0.0)


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
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) with r = exp(log_ratio), and where clipping is active."""
    _check_clip_ranges(clip_low, clip_high)
    ratio = _probability_ratio(log_ratio)
    plain = -ratio * advantages
    clipped = -ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    return torch.maximum(plain, clipped), clipped > plain


def _token_sums(log_ratio: Tensor, mask: Tensor, **chosen: Tensor) -> dict[str, Tensor]:
    """Return a loss's log: the number of true tokens of each ``chosen``, ``ppo_kl`` and ``num_tokens``."""
    counts = {name: tokens.sum().to(log_ratio.dtype) for name, tokens in chosen.items()}
    return counts | {"ppo_kl": -log_ratio.detach().sum(), "num_tokens": mask.sum().to(log_ratio.dtype)}
