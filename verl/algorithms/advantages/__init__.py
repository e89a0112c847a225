"""Advantage estimators by name: ``algorithm.adv_estimator`` selects one.

Common to all of them: B responses, R response columns, G groups, one for each prompt;

- ``token_rewards [B, R]`` floating point, in units of reward; the score s of a response is the sum of its own;
- ``response_mask [B, R]``, true or 1 on response tokens; the other tensors may hold anything outside it;
- ``learned_mask [B, R]``, the response tokens to learn from; the others count in the statistics of their group alone;
- ``group_ids [B]`` int64, equal for responses to the same prompt; in any order.

Each returns advantages ``[B, R]``, computed in float64, in the dtype of ``token_rewards`` and 0 outside the mask, in
units of reward, or of a standard deviation where it divides by one. Each raises ``ValueError`` if shapes do not match.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from verl.algorithms.advantages import estimators


class EstimatorOptions(NamedTuple):
    """Inputs of an estimator besides rewards, mask and groups."""

    norm_by_std: bool
    """Divide by the group's standard deviation (``grpo``, ``grpo_passk``)."""
    gamma: float
    """Discount per token (``reinforce_plus_plus``, ``gae``)."""
    lam: float
    """Lambda, the weight of later temporal differences (``gae``)."""
    learned_mask: Tensor
    """Whitening and the scale of ``gpg`` are over these, ``[B, R]``."""
    values: Tensor | None
    """The critic's values, ``[B, R]`` (``gae``)."""
    greedy_scores: Tensor | None
    """Score of the greedy response to the same prompt, ``[B]`` (``remax``)."""
    variances: Tensor | None = None
    """Of each token, ``[B, R]`` (``optimal_token_baseline``, ``tir_optimal_token_baseline``)."""


class AdvantageEstimate(NamedTuple):
    """The output of an estimator."""

    advantages: Tensor
    """``[B, R]``, 0 outside the mask."""
    returns: Tensor | None = None
    """The critic's regression target, ``[B, R]`` (``gae``)."""


def _whitened_gae(rewards: Tensor, mask: Tensor, _: Tensor, options: Any) -> AdvantageEstimate:
    advantages, returns = estimators.gae_advantages(rewards, options.values, mask, options.gamma, options.lam)
    return AdvantageEstimate(estimators.whitened(advantages, options.learned_mask), returns)


_WITHOUT_CRITIC: dict[str, Callable[[Tensor, Tensor, Tensor, Any], Tensor]] = {
    "grpo": lambda r, m, g, options: estimators.grpo_advantages(r, m, g, options.norm_by_std),
    "grpo_passk": lambda r, m, g, options: estimators.grpo_passk_advantages(r, m, g, options.norm_by_std),
    "gpg": lambda r, m, g, options: estimators.gpg_advantages(r, m, g, options.learned_mask),
    "opo": lambda r, m, g, _: estimators.opo_advantages(r, m, g),
    "optimal_token_baseline": lambda r, m, g, options: estimators.optimal_token_baseline_advantages(
        r, m, g, options.variances, zero_tail=False
    ),
    "tir_optimal_token_baseline": lambda r, m, g, options: estimators.optimal_token_baseline_advantages(
        r, m, g, options.variances, zero_tail=True
    ),
    "rloo": lambda r, m, g, _: estimators.rloo_advantages(r, m, g),
    "reinforce_plus_plus": lambda r, _, __, options: estimators.reinforce_plus_plus_advantages(
        r, options.learned_mask, options.gamma
    ),
    "reinforce_plus_plus_baseline": lambda r, m, g, options: estimators.reinforce_plus_plus_baseline_advantages(
        r, m, g, options.learned_mask
    ),
    "remax": lambda r, m, _, options: estimators.remax_advantages(r, m, options.greedy_scores),
}
"""Name -> f(token rewards, response mask, group ids, :class:`EstimatorOptions`) -> advantages."""


def _without_returns(name: str) -> Callable[..., AdvantageEstimate]:
    return lambda *inputs: AdvantageEstimate(_WITHOUT_CRITIC[name](*inputs))


ADVANTAGE_ESTIMATORS: dict[str, Callable[[Tensor, Tensor, Tensor, EstimatorOptions], AdvantageEstimate]] = {
    "gae": _whitened_gae,
    **{name: _without_returns(name) for name in _WITHOUT_CRITIC},
}
"""Name -> f(token_rewards [B, R], response_mask [B, R], group_ids [B], options) -> :class:`AdvantageEstimate`.

``gae`` whitens its advantages over the batch, as is usual in PPO for language models.
"""
