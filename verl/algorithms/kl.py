"""KL(policy || reference): estimators per token, the penalty in the rewards, and the controllers of its coefficient.

Estimators: Schulman 2020, "Approximating KL divergence", under veRL's names. Each takes ``logprobs [B, R]`` and
``ref_logprobs [B, R]`` in nats, returns ``[B, R]`` and is differentiable in ``logprobs``.

As a loss, an estimator needs a good gradient, not a good value. On policy, with x = log p - log p_ref, the gradient of
the divergence is the mean of x grad log p. That of k2 is x grad log p: right. That of k1 is grad log p, whose mean is
0, and that of k3 is (1 - exp(-x)) grad log p, which agrees for small x only. ``abs`` has the gradient of the sum of
|p - p_ref| over tokens. A name with the suffix ``+`` has the value of its estimator and the gradient of k2
(straight-through).

Penalty and controllers: Ziegler et al. 2019, "Fine-Tuning Language Models from Human Preferences" (arXiv 1909.08593),
section 2.2. The reward becomes r - coef * KL(policy || reference), and the coefficient may follow a target KL.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""``low_var_kl`` clamps log p_ref - log p to [-20, 20], and the weight of :func:`kl_loss` its log-ratio, so
that exp stays finite."""

MAX_LOW_VAR_KL = 10.0
"""``low_var_kl`` is at most this, as in veRL: an outlier, a token 13 times as likely under the reference, does not
dominate a batch. Beyond it the gradient is 0."""

ERROR_LIMIT = 0.2
"""The adaptive controller clips its proportional error to [-0.2, 0.2]."""


def kl(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """k1: log p - log p_ref. Unbiased; may be negative."""
    return logprobs - ref_logprobs


def abs_kl(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Absolute value of k1: \\|log p - log p_ref\\|. Biased, never negative."""
    return (logprobs - ref_logprobs).abs()


def mse_kl(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """k2: (log p - log p_ref)^2 / 2. Biased, low variance, never negative."""
    return 0.5 * (logprobs - ref_logprobs).square()


def low_var_kl(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """k3: exp(x) - x - 1 with x = log p_ref - log p. Unbiased, low variance, never negative.

    x is clamped to +-``MAX_LOG_RATIO``, the whole to ``MAX_LOW_VAR_KL``; the estimate is unbiased within these bounds.
    """
    x = (ref_logprobs - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return (x.expm1() - x).clamp(max=MAX_LOW_VAR_KL)


KLEstimator = Callable[[Tensor, Tensor], Tensor]

_BY_VALUE: dict[str, KLEstimator] = {
    "kl": kl,
    "k1": kl,
    "abs": abs_kl,
    "mse": mse_kl,
    "k2": mse_kl,
    "low_var_kl": low_var_kl,
    "k3": low_var_kl,
}


def straight_through(estimator: KLEstimator) -> KLEstimator:
    """Return the value of ``estimator`` with the gradient of k2, which no clamp stops."""

    def estimate(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
        carrier = mse_kl(logprobs, ref_logprobs)
        # Zero first: adding a large k2 and taking it away again would round the value.
        return (carrier - carrier.detach()) + estimator(logprobs, ref_logprobs).detach()

    return estimate


KL_ESTIMATORS = _BY_VALUE | {f"{name}+": straight_through(estimator) for name, estimator in _BY_VALUE.items()}
"""Name in the configuration -> estimator."""


def kl_loss(
    kl_type: str | KLEstimator, logprobs: Tensor, ref_logprobs: Tensor, old_logprobs: Tensor | None = None
) -> Tensor:
    """Return the estimate ``[B, R]`` that is added to the policy's loss.

    Args:
        kl_type: a key of ``KL_ESTIMATORS``, or an estimator.
        old_logprobs: ``[B, R]``, under the policy that sampled the tokens: the estimate is weighted by the ratio
            r = exp(logprobs - old_logprobs), so that value and gradient stay right once the policy has moved away from
            it (DeepSeek-V3.2, arXiv 2512.02556, section 3.1). None: no weight.

    With k1, k3, ``abs`` and an estimator without a name, the gradient passes through the weight as well: with k3 the
    sum is r x grad log p, with k1 r (x + 1) grad log p, whose mean is the same, on policy too. k2, and every name with
    a ``+``, have the factor x grad log p already, so the weight is a constant there.
    """
    estimate = _estimator(kl_type)(logprobs, ref_logprobs)
    if old_logprobs is None:
        return estimate
    ratio = (logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    constant = isinstance(kl_type, str) and (kl_type.endswith("+") or kl_type in ("mse", "k2"))
    return (ratio.detach() if constant else ratio) * estimate


class KLController:
    """The coefficient of the KL penalty, in units of reward per nat.

    ``fixed``: a constant. ``adaptive``: it steers the KL towards a target, coef <- coef (1 + e num_steps / horizon),
    e = clip(current_kl / target - 1, -0.2, 0.2). The paper's gain K is num_steps / horizon, as in its code.
    """

    def __init__(self, kind: str, coef: float, target: float, horizon: float) -> None:
        """Start from the coefficient ``coef``; an adaptive one is above 0 (one of 0 could never grow).

        Args:
            kind: ``fixed`` or ``adaptive``; target and horizon are of the latter alone, and above 0.
            target: nats; per token if the KL passed to :meth:`update` is.
            horizon: in the unit of ``num_steps``.
        """
        self.adaptive = kind == "adaptive"
        self.coef, self.target, self.horizon = float(coef), float(target), float(horizon)

    def update(self, current_kl: float, num_steps: float) -> None:
        """Adapt the coefficient to one batch: its mean KL in nats and its number of responses.

        Raises:
            ValueError: ``current_kl`` is NaN, or ``num_steps`` is not in (0, horizon / 0.2), the range in which the
                coefficient stays positive. The coefficient is then unchanged.
        """
        if not self.adaptive:
            return
        if math.isnan(current_kl):
            raise ValueError(f"current_kl={current_kl}: the log-probabilities of the policy or the reference hold NaN")
        if not 0 < num_steps < self.horizon / ERROR_LIMIT:
            raise ValueError(
                f"num_steps={num_steps}: must be above 0 and below {self.horizon / ERROR_LIMIT}, or the coefficient "
                f"could become negative; set a larger horizon than {self.horizon}"
            )
        error = min(ERROR_LIMIT, max(-ERROR_LIMIT, current_kl / self.target - 1))
        self.coef *= 1 + error * num_steps / self.horizon

    def state_dict(self) -> dict[str, float]:
        """Return the coefficient, which JSON keeps exactly. Target and horizon belong to the configuration."""
        return {"coef": self.coef}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the coefficient; a fixed one stays as it is configured, which a resumed run may change.

        Raises:
            ValueError: the state is malformed, or an adaptive coefficient not above 0; nothing is then changed.
        """
        if not isinstance(state, Mapping) or set(state) != {"coef"}:
            raise ValueError(f"KL controller state {state!r}: expected the key coef alone")
        coef = state["coef"]
        if isinstance(coef, bool) or not isinstance(coef, int | float) or not 0 <= coef < math.inf:
            raise ValueError(f"KL controller state: coef={coef!r}: must be a finite number and at least 0")
        if self.adaptive and not coef > 0:
            raise ValueError(f"KL controller state: coef={float(coef)}: an adaptive coefficient must be above 0")
        self.coef = float(coef) if self.adaptive else self.coef


def kl_penalised_rewards(
    token_rewards: Tensor,
    logprobs: Tensor,
    ref_logprobs: Tensor,
    response_mask: Tensor,
    coef: float,
    kl_type: str | KLEstimator,
) -> tuple[Tensor, Tensor]:
    """Rewards r_t - coef * kl_t, and the mean KL that a controller follows.

    Args:
        token_rewards: ``[B, R]``, as the next three.
        logprobs: under the policy that sampled the tokens.
        response_mask: true or 1 on response tokens; padding may hold anything.
        coef: units of reward per nat, at least 0.
        kl_type: a key of ``KL_ESTIMATORS``, or an estimator.

    Returns:
        Rewards ``[B, R]`` in the dtype of ``token_rewards``, 0 outside the mask, and the mean of kl_t over the tokens
        of a response, averaged over the responses that have any, as in veRL (a scalar, nats per token, 0 without
        tokens). Both are detached.
    """
    mask = response_mask.bool()
    with torch.no_grad():
        estimate = _estimator(kl_type)(logprobs, ref_logprobs)
        penalty = torch.where(mask, estimate, 0.0)
        rewards = torch.where(mask, token_rewards - coef * penalty, 0.0).to(token_rewards.dtype)
        means = penalty.sum(dim=1) / mask.sum(dim=1).clamp(min=1)
        return rewards, means.sum() / mask.any(dim=1).sum().clamp(min=1)


def _estimator(kl_type: str | KLEstimator) -> KLEstimator:
    return KL_ESTIMATORS[kl_type] if isinstance(kl_type, str) else kl_type
