"""Per-token estimators of KL(policy || reference) from the log-probabilities of sampled tokens.

Schulman 2020, "Approximating KL divergence". All take ``logprobs [B, R]`` and ``ref_logprobs [B, R]`` in nats, return
``[B, R]`` and are differentiable in ``logprobs``.
"""

from collections.abc import Callable

from torch import Tensor

MAX_LOG_RATIO = 20.0
"""``low_var_kl`` holds ref - policy below this, so that exp stays finite; beyond it the gradient is 0."""


def kl(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """k1: log p - log p_ref. Unbiased, of either sign."""
    return logprobs - ref_logprobs


def abs_kl(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Absolute value of k1: \\|log p - log p_ref\\|. Biased, never negative."""
    return (logprobs - ref_logprobs).abs()


def mse_kl(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """k2: (log p - log p_ref)^2 / 2. Biased, low variance, never negative."""
    return 0.5 * (logprobs - ref_logprobs).square()


def low_var_kl(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """k3: exp(x) - x - 1 with x = log p_ref - log p. Unbiased, low variance, never negative.

    x is held at ``MAX_LOG_RATIO`` as a whole: with the exponent alone held, the remaining -x would push a token
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
