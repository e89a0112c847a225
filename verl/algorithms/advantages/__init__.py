"""Advantage estimators, selected by name with ``algorithm.adv_estimator``.

Shapes: B responses, R response columns, G groups (one per prompt). Common arguments:

- ``token_rewards [B, R]``: floating-point rewards per token. A response's score s is the sum of its rewards.
- ``response_mask [B, R]``: true or 1 on the tokens that the policy wrote. Other tensors are ignored outside this mask.
- ``learned_mask [B, R]``: true on tokens to learn from. Other tokens only affect the statistics of their group.
- ``group_ids [B]``: int64 ids in any order, equal for responses to the same prompt.

Advantages are ``[B, R]`` in the dtype of ``token_rewards``, computed in float64, and 0 outside the mask. They are in
units of reward, or in standard deviations if the estimator normalizes. Mismatched shapes raise ``ValueError``.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from verl.algorithms.advantages import estimators


def _whitened_gae(
    rewards: Tensor,
    mask: Tensor,
    _: Tensor,
    *,
    values: Tensor,
    gamma: float,
    lam: float,
    learned_mask: Tensor,
    **__: Any,
) -> tuple[Tensor, Tensor]:
    advantages, returns = estimators.gae_advantages(rewards, values, mask, gamma, lam)
    return estimators.whitened(advantages, learned_mask), returns


_WITHOUT_CRITIC: dict[str, Callable[..., Tensor]] = {
    "grpo": lambda r, m, g, *, norm_by_std, **_: estimators.grpo_advantages(r, m, g, norm_by_std),
    "grpo_passk": lambda r, m, g, *, norm_by_std, **_: estimators.grpo_passk_advantages(r, m, g, norm_by_std),
    "gpg": lambda r, m, g, *, learned_mask, **_: estimators.gpg_advantages(r, m, g, learned_mask),
    "opo": lambda r, m, g, **_: estimators.opo_advantages(r, m, g),
    "optimal_token_baseline": lambda r, m, g, *, variances, **_: estimators.optimal_token_baseline_advantages(
        r, m, g, variances
    ),
    "rloo": lambda r, m, g, **_: estimators.rloo_advantages(r, m, g),
    "reinforce_plus_plus": lambda r, _, __, *, learned_mask, gamma, **___: estimators.reinforce_plus_plus_advantages(
        r, learned_mask, gamma
    ),
    "reinforce_plus_plus_baseline": lambda r, m, g, *, learned_mask, **_: (
        estimators.reinforce_plus_plus_baseline_advantages(r, m, g, learned_mask)
    ),
    "remax": lambda r, m, _, *, greedy_scores, **__: estimators.remax_advantages(r, m, greedy_scores),
}
_WITHOUT_CRITIC["tir_optimal_token_baseline"] = _WITHOUT_CRITIC["optimal_token_baseline"]


def _without_returns(name: str) -> Callable[..., tuple[Tensor, None]]:
    return lambda *inputs, **options: (_WITHOUT_CRITIC[name](*inputs, **options), None)


ADVANTAGE_ESTIMATORS: dict[str, Callable[..., tuple[Tensor, Tensor | None]]] = {
    "gae": _whitened_gae,
    **{name: _without_returns(name) for name in _WITHOUT_CRITIC},
}
"""Maps each name to f(token_rewards [B, R], response_mask [B, R], group_ids [B], **options) -> (advantages, returns).

Both results are ``[B, R]``. The returns are the critic's regression targets, or None for estimators without a critic.
``gae`` whitens its advantages over the batch, as is usual in PPO for language models. Options:

- ``norm_by_std``: whether to divide by the group's standard deviation (``grpo``, ``grpo_passk``)
- ``gamma``: discount per token (``reinforce_plus_plus``, ``gae``)
- ``lam``: lambda, the weight of later temporal differences (``gae``)
- ``learned_mask [B, R]``: tokens used to compute whitening statistics and the scale of ``gpg``
- ``values [B, R]``: the critic's values (``gae``)
- ``greedy_scores [B]``: score of the greedy response to the same prompt (``remax``)
- ``variances [B, R]``: variance of each token (``optimal_token_baseline``, ``tir_optimal_token_baseline``)
"""
