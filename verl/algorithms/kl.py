"""KL(policy || reference): estimators per token, the penalty in the rewards, and the controllers of its coefficient.

Estimators: Schulman 2020, "Approximating KL divergence". Each takes ``logprobs [B, R]`` and ``ref_logprobs [B, R]`` in
nats, returns ``[B, R]`` and is differentiable in ``logprobs``.

Penalty and controllers: Ziegler et al. 2019, "Fine-Tuning Language Models from Human Preferences" (arXiv 1909.08593),
section 2.2. The reward becomes r - coef * KL(policy || reference), and the coefficient may follow a target KL.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""``low_var_kl`` clamps ref - policy to this, so that exp stays finite; beyond it the gradient is 0."""

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

    x as a whole is clamped to ``MAX_LOG_RATIO``: if only the exponent were clamped, the remaining -x would push a token
    away from the reference.
    """
    x = (ref_logprobs - logprobs).clamp(max=MAX_LOG_RATIO)
    return x.expm1() - x


KL_ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "kl": kl,
    "abs": abs_kl,
    "mse": mse_kl,
    "low_var_kl": low_var_kl,
}
"""Name in the configuration -> estimator."""


class FixedKLController:
    """A constant coefficient."""

    def __init__(self, coef: float) -> None:
        """``coef`` per nat of KL, in units of reward, at least 0.

        Raises:
            ValueError: ``coef`` is out of range.
        """
        if not 0 <= coef < math.inf:
            raise ValueError(f"coef={coef}: must be finite and at least 0")
        self.coef = float(coef)

    def update(self, current_kl: float, num_steps: float) -> None:
        """Do nothing; the arguments are those of :meth:`AdaptiveKLController.update`."""

    def state_dict(self) -> dict[str, float]:
        """The coefficient."""
        return {"coef": self.coef}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Check a saved state, but keep the configured coefficient, so that a resumed run may change it.

        Raises:
            ValueError: the state is malformed.
        """
        _saved_coef(state)


class AdaptiveKLController:
    """A coefficient that steers the KL towards a target: coef <- coef (1 + e num_steps / horizon).

    e = clip(current_kl / target - 1, -0.2, 0.2). The paper's gain K is num_steps / horizon, as in its code.
    """

    def __init__(self, init: float, target: float, horizon: float) -> None:
        """Start from the coefficient ``init``.

        Args:
            init: units of reward per nat of KL.
            target: nats; per token if the KL passed to :meth:`update` is.
            horizon: in the unit of ``num_steps``.

        Raises:
            ValueError: an argument is not finite and above 0 (a coefficient of 0 could never grow).
        """
        for name, value in (("init", init), ("target", target), ("horizon", horizon)):
            if not 0 < value < math.inf:
                raise ValueError(f"{name}={value}: must be finite and above 0")
        self.coef = float(init)
        self.target = float(target)
        self.horizon = float(horizon)

    def update(self, current_kl: float, num_steps: float) -> None:
        """Adapt the coefficient to one batch: its mean KL in nats and its number of responses.

        Raises:
            ValueError: ``current_kl`` is NaN, or ``num_steps`` is not in (0, horizon / 0.2), the range in which the
                coefficient stays positive. The coefficient is then unchanged.
        """
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
        """The coefficient, which JSON keeps exactly. Target and horizon belong to the configuration."""
        return {"coef": self.coef}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the coefficient that :meth:`state_dict` returned.

        Raises:
            ValueError: the state is malformed, or its coefficient is not above 0; the controller is then unchanged.
        """
        coef = _saved_coef(state)
        if not coef > 0:
            raise ValueError(f"KL controller state: coef={coef}: an adaptive coefficient must be above 0")
        self.coef = coef


def kl_controller(kind: str, coef: float, target: float, horizon: float) -> FixedKLController | AdaptiveKLController:
    """The controller named ``kind``, ``fixed`` or ``adaptive``; raises ``ValueError`` as its constructor."""
    return FixedKLController(coef) if kind == "fixed" else AdaptiveKLController(coef, target, horizon)


def kl_penalised_rewards(
    token_rewards: Tensor,
    logprobs: Tensor,
    ref_logprobs: Tensor,
    response_mask: Tensor,
    coef: float,
    kl_type: str,
) -> tuple[Tensor, Tensor]:
    """Rewards r_t - coef * kl_t, and the mean KL that a controller follows.

    Args:
        token_rewards: ``[B, R]``.
        logprobs: ``[B, R]`` log-probabilities (nats) of the response tokens under the policy that sampled them.
        ref_logprobs: ``[B, R]`` the same under the reference policy.
        response_mask: ``[B, R]``, true or 1 on response tokens; padding may hold anything.
        coef: units of reward per nat, at least 0.
        kl_type: a key of ``KL_ESTIMATORS``.

    Returns:
        Rewards ``[B, R]`` in the dtype of ``token_rewards``, 0 outside the mask, and the mean of kl_t over all
        response tokens (a scalar, nats per token, 0 without tokens). Both are detached.

    Raises:
        ValueError: unknown ``kl_type``, or ``coef`` out of range.
    """
    if kl_type not in KL_ESTIMATORS:
        raise ValueError(f"kl_type={kl_type!r}: must be one of {', '.join(KL_ESTIMATORS)}")
    if not 0 <= coef < math.inf:
        raise ValueError(f"coef={coef}: must be finite and at least 0")
    mask = response_mask.bool()
    with torch.no_grad():
        estimate = KL_ESTIMATORS[kl_type](logprobs, ref_logprobs)
        penalty = torch.where(mask, estimate, 0.0)
        rewards = torch.where(mask, token_rewards - coef * penalty, 0.0).to(token_rewards.dtype)
        return rewards, penalty.sum() / mask.sum().clamp(min=1)


def _saved_coef(state: Mapping[str, Any]) -> float:
    """The coefficient in a saved state; ``ValueError`` unless the state is ``{"coef": finite number >= 0}``."""
    if not isinstance(state, Mapping) or set(state) != {"coef"}:
        raise ValueError(f"KL controller state {state!r}: expected the key coef alone")
    coef = state["coef"]
    if isinstance(coef, bool) or not isinstance(coef, int | float) or not 0 <= coef < math.inf:
        raise ValueError(f"KL controller state: coef={coef!r}: must be a finite number and at least 0")
    return float(coef)
