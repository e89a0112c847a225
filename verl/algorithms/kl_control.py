"""The KL penalty in the rewards and the controllers of its coefficient.

Ziegler et al. 2019, "Fine-Tuning Language Models from Human Preferences" (arXiv 1909.08593), section 2.2: the reward
becomes r - coef * KL(policy || reference), and the coefficient may follow a target divergence. Shapes: B responses, R
padded response tokens.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from verl.algorithms.kl import KL_ESTIMATORS

ERROR_LIMIT = 0.2
"""The proportional error of an update is clipped to this on either side."""


class FixedKLController:
    """A coefficient that stays what the configuration says."""

    def __init__(self, coef: float) -> None:
        """``coef`` per nat of KL, in units of reward, at least 0.

        Raises:
            ValueError: ``coef`` is out of bounds.
        """
        if not 0 <= coef < math.inf:
            raise ValueError(f"coef={coef}: must be finite and at least 0")
        self.coef = float(coef)

    def update(self, current_kl: float, num_steps: float) -> None:
        """Changes nothing; the arguments are those of :meth:`AdaptiveKLController.update`."""

    def state_dict(self) -> dict[str, float]:
        """The coefficient as a plain float."""
        return {"coef": self.coef}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Check a saved state and keep the configured coefficient: changing it for a resumed run has to work.

        Raises:
            ValueError: the state is malformed.
        """
        _saved_coef(state)


class AdaptiveKLController:
    """A coefficient that follows a target divergence: coef <- coef (1 + e num_steps / horizon).

    e = clip(current_kl / target - 1, -0.2, 0.2). The paper's gain K is num_steps / horizon here, as in its code.
    """

    def __init__(self, init: float, target: float, horizon: float) -> None:
        """``init`` is the first coefficient, per nat of KL in units of reward; ``target`` is in nats, per token if
        the divergence passed to :meth:`update` is; ``horizon`` in the unit of ``num_steps``. All are above 0.

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
        """Follow one batch: ``current_kl`` is its mean divergence in nats, ``num_steps`` its number of responses.

        Raises:
            ValueError: ``current_kl`` is NaN, or ``num_steps`` is not in (0, horizon / 0.2), where the coefficient
                stays positive. The coefficient is then unchanged.
        """
        if math.isnan(current_kl):
            raise ValueError(f"current_kl={current_kl}: the log-probabilities of policy or reference hold NaN")
        if not 0 < num_steps < self.horizon / ERROR_LIMIT:
            raise ValueError(
                f"num_steps={num_steps}: must be above 0 and below {self.horizon / ERROR_LIMIT}, or the coefficient "
                f"could turn negative; set a larger horizon than {self.horizon}"
            )
        error = min(ERROR_LIMIT, max(-ERROR_LIMIT, current_kl / self.target - 1))
        self.coef *= 1 + error * num_steps / self.horizon

    def state_dict(self) -> dict[str, float]:
        """The coefficient as a plain float; JSON keeps it exactly. Target and horizon belong to the configuration."""
        return {"coef": self.coef}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave.

        Raises:
            ValueError: the state is malformed, or its coefficient is not above 0; the controller is then unchanged.
        """
        coef = _saved_coef(state)
        if not coef > 0:
            raise ValueError(f"KL controller state: coef={coef}: an adaptive coefficient must be above 0")
        self.coef = coef


def kl_controller(kind: str, coef: float, target: float, horizon: float) -> FixedKLController | AdaptiveKLController:
    """The controller named ``kind``: ``fixed`` or ``adaptive``; raises ``ValueError`` as their constructors."""
    return FixedKLController(coef) if kind == "fixed" else AdaptiveKLController(coef, target, horizon)


def kl_penalised_rewards(
    token_rewards: Tensor,
    logprobs: Tensor,
    ref_logprobs: Tensor,
    response_mask: Tensor,
    coef: float,
    kl_type: str,
) -> tuple[Tensor, Tensor]:
    """Rewards r_t - coef * kl_t, and the divergence that a controller follows.

    Args:
        token_rewards: ``[B, R]``.
        logprobs: ``[B, R]`` log-probabilities (nats) of the response tokens under the policy that sampled them.
        ref_logprobs: ``[B, R]`` the same under the reference policy.
        response_mask: ``[B, R]``, true or 1 on response tokens; what padding holds never matters.
        coef: units of reward per nat, at least 0.
        kl_type: a key of ``KL_ESTIMATORS``.

    Returns:
        Rewards ``[B, R]`` in the dtype of ``token_rewards``, 0 outside the mask, and the mean of kl_t over all
        response tokens (nats per token, 0 without tokens), a scalar. Both are detached.

    Raises:
        ValueError: unknown ``kl_type``, or ``coef`` out of bounds.
    """
    if kl_type not in KL_ESTIMATORS:
        raise ValueError(f"kl_type={kl_type!r}: must be one of {', '.join(KL_ESTIMATORS)}")
    if not 0 <= coef < math.inf:
        raise ValueError(f"coef={coef}: must be finite and at least 0")
    mask = response_mask.bool()
    with torch.no_grad():
        estimate = KL_ESTIMATORS[kl_type](logprobs, ref_logprobs)
        kl = torch.where(mask, estimate, 0.0)
        rewards = torch.where(mask, token_rewards - coef * kl, 0.0).to(token_rewards.dtype)
        return rewards, kl.sum() / mask.sum().clamp(min=1)


def _saved_coef(state: Mapping[str, Any]) -> float:
    """The coefficient in a saved state; ``ValueError`` if it is not exactly ``{"coef": finite number >= 0}``."""
    if not isinstance(state, Mapping) or set(state) != {"coef"}:
        raise ValueError(f"KL controller state {state!r}: expected the key coef")
    coef = state["coef"]
    if isinstance(coef, bool) or not isinstance(coef, int | float) or not 0 <= coef < math.inf:
        raise ValueError(f"KL controller state: coef={coef!r}: expected a finite number, at least 0")
    return float(coef)
