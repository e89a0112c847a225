"""Per-token estimators of KL(policy || reference), the KL penalty on rewards, and controllers for its coefficient.

The estimators follow Schulman 2020, "Approximating KL divergence", and have the same names as in veRL. Estimators map
``logprobs [B, R]`` and ``ref_logprobs [B, R]`` in nats to ``[B, R]`` and are differentiable in ``logprobs``.

When an estimator is used as a loss, only its gradient matters. On policy, with x = log p - log p_ref, the gradient of
the divergence is the mean of x grad log p. The gradient of k2 is exactly x grad log p. The gradient of k1 is grad log
p, whose mean is 0. The gradient of k3 is (1 - exp(-x)) grad log p, which approximates x grad log p only for small x.
The mean gradient of ``abs`` equals the gradient of the sum of |p - p_ref| over the vocabulary. The suffix ``+``
combines the value of an estimator with the gradient of k2 (straight-through).

The penalty and the controllers follow Ziegler et al. 2019, "Fine-Tuning Language Models from Human Preferences" (arXiv
1909.08593), section 2.2. The reward becomes r - coef * KL(policy || reference), where coef is fixed or adaptive.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios in ``low_var_kl`` and :func:`kl_loss` are clamped to [-20, 20], so that exp stays finite."""

MAX_LOW_VAR_KL = 10.0
"""Upper bound on ``low_var_kl``, as in veRL. The bound keeps outliers (tokens about 13 times as likely under the
reference) from dominating a batch. Beyond the bound, the gradient is 0."""

ERROR_LIMIT = 0.2
"""The adaptive controller clips its proportional error to [-0.2, 0.2]."""


def kl(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Compute k1, log p - log p_ref, which is unbiased and may be negative."""
    return logprobs - ref_logprobs


def abs_kl(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Compute the absolute value of k1, which is biased and never negative."""
    return (logprobs - ref_logprobs).abs()


def mse_kl(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Compute k2, (log p - log p_ref)^2 / 2, which is biased, has low variance, and is never negative."""
    return 0.5 * (logprobs - ref_logprobs).square()


def low_var_kl(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Compute k3, exp(x) - x - 1 with x = log p_ref - log p, which has low variance and is never negative.

    The estimate is unbiased, except where x is clamped to +-``MAX_LOG_RATIO`` or the result to ``MAX_LOW_VAR_KL``.
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
    """Return an estimator with the value of ``estimator`` and the gradient of k2."""

    def estimate(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
        carrier = mse_kl(logprobs, ref_logprobs)
        # The difference is exactly 0, so the value is not rounded.
        return (carrier - carrier.detach()) + estimator(logprobs, ref_logprobs).detach()

    return estimate


KL_ESTIMATORS = _BY_VALUE | {f"{name}+": straight_through(estimator) for name, estimator in _BY_VALUE.items()}
"""Maps each name in the configuration to its estimator."""


def kl_loss(
    kl_type: str | KLEstimator, logprobs: Tensor, ref_logprobs: Tensor, old_logprobs: Tensor | None = None
) -> Tensor:
    """Return the KL estimate ``[B, R]`` to add to the policy loss.

    Args:
        kl_type: key of ``KL_ESTIMATORS``, or an estimator.
        old_logprobs: log-probabilities ``[B, R]`` under the policy that sampled the tokens, or None for no weighting.
            The estimate is weighted by the ratio r = exp(logprobs - old_logprobs), so that its value and
            gradient stay correct off-policy (DeepSeek-V3.2, arXiv 2512.02556, section 3.1).

    For k1, k3, ``abs`` and custom estimators, the gradient also flows through the ratio. The total gradient is r x grad
    log p for k3, and r (x + 1) grad log p, which has the same mean, for k1. For k2 and all names with ``+``, whose
    gradient is already correct, the ratio is treated as a constant.
    """
    estimate = _estimator(kl_type)(logprobs, ref_logprobs)
    if old_logprobs is None:
        return estimate
    ratio = (logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    constant = isinstance(kl_type, str) and (kl_type.endswith("+") or kl_type in ("mse", "k2"))
    return (ratio.detach() if constant else ratio) * estimate


class KLController:
    """Controller for the KL penalty coefficient, in units of reward per nat.

    A ``fixed`` coefficient is constant. An ``adaptive`` coefficient steers the KL towards the target with the update
    coef <- coef (1 + e num_steps / horizon), with e = clip(current_kl / target - 1, -0.2, 0.2). num_steps / horizon is
    the gain K of the paper.
    """

    def __init__(self, kind: str, coef: float, target: float, horizon: float) -> None:
        """Create a controller with the initial coefficient ``coef``.

        Args:
            kind: ``fixed`` or ``adaptive``. An adaptive controller needs a positive ``coef``, target and horizon.
            target: target KL in the unit of the KL passed to :meth:`update`, such as nats per token.
            horizon: time scale of the adaptation in the unit of ``num_steps``.
        """
        self.adaptive = kind == "adaptive"
        self.coef, self.target, self.horizon = float(coef), float(target), float(horizon)

    def update(self, current_kl: float, num_steps: float) -> None:
        """Update the coefficient for a batch with mean KL ``current_kl`` and ``num_steps`` responses.

        Raises ``ValueError`` if ``current_kl`` is NaN, or if ``num_steps`` is not in (0, horizon / 0.2), the range in
        which the coefficient stays positive. The coefficient then remains unchanged.
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
        """Return the coefficient."""
        return {"coef": self.coef}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the coefficient if it is adaptive. A fixed coefficient keeps its configured value.

        Raises ``ValueError`` if the state is malformed or an adaptive coefficient is not positive.
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
    """Return the rewards r_t - coef * kl_t, and the mean KL for the controller.

    Args:
        token_rewards: rewards ``[B, R]``; the next three tensors have the same shape.
        logprobs: log-probabilities under the policy that sampled the tokens.
        response_mask: true or 1 on response tokens; values outside it are ignored.
        coef: nonnegative coefficient in units of reward per nat.
        kl_type: key of ``KL_ESTIMATORS``, or an estimator.

    Returns:
        Rewards ``[B, R]`` in the dtype of ``token_rewards``, 0 outside the mask, and the mean KL, a scalar in nats per
        token. As in veRL, it is averaged over the tokens of each response, then over non-empty responses. Both results
        are detached.
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
