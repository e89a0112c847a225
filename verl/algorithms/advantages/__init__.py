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
from typing import NamedTuple

from torch import Tensor

from verl.algorithms.advantages.gae import gae_advantages
from verl.algorithms.advantages.gpg import gpg_advantages
from verl.algorithms.advantages.grpo import grpo_advantages
from verl.algorithms.advantages.grpo_passk import grpo_passk_advantages
from verl.algorithms.advantages.opo import opo_advantages
from verl.algorithms.advantages.optimal_token_baseline import optimal_token_baseline_advantages, token_variances
from verl.algorithms.advantages.reinforce_plus_plus import (
    reinforce_plus_plus_advantages,
    reinforce_plus_plus_baseline_advantages,
)
from verl.algorithms.advantages.remax import remax_advantages
from verl.algorithms.advantages.rloo import rloo_advantages
from verl.algorithms.advantages.whiten import whitened


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


Estimator = Callable[[Tensor, Tensor, Tensor, EstimatorOptions], AdvantageEstimate]


def _whitened_gae(rewards: Tensor, mask: Tensor, _: Tensor, options: EstimatorOptions) -> AdvantageEstimate:
    advantages, returns = gae_advantages(rewards, _required(options.values), mask, options.gamma, options.lam)
    return AdvantageEstimate(whitened(advantages, options.learned_mask), returns)


_WITHOUT_CRITIC: dict[str, Callable[[Tensor, Tensor, Tensor, EstimatorOptions], Tensor]] = {
    "grpo": lambda rewards, mask, groups, options: grpo_advantages(rewards, mask, groups, options.norm_by_std),
    "grpo_passk": lambda rewards, mask, groups, options: grpo_passk_advantages(
        rewards, mask, groups, options.norm_by_std
    ),
    "gpg": lambda rewards, mask, groups, options: gpg_advantages(rewards, mask, groups, options.learned_mask),
    "opo": lambda rewards, mask, groups, _: opo_advantages(rewards, mask, groups),
    "optimal_token_baseline": lambda rewards, mask, groups, options: optimal_token_baseline_advantages(
        rewards, mask, groups, _required(options.variances), zero_tail=False
    ),
    "tir_optimal_token_baseline": lambda rewards, mask, groups, options: optimal_token_baseline_advantages(
        rewards, mask, groups, _required(options.variances), zero_tail=True
    ),
    "rloo": lambda rewards, mask, groups, _: rloo_advantages(rewards, mask, groups),
    "reinforce_plus_plus": lambda rewards, _, __, options: reinforce_plus_plus_advantages(
        rewards, options.learned_mask, options.gamma
    ),
    "reinforce_plus_plus_baseline": lambda rewards, mask, groups, options: reinforce_plus_plus_baseline_advantages(
        rewards, mask, groups, options.learned_mask
    ),
    "remax": lambda rewards, mask, _, options: remax_advantages(rewards, mask, _required(options.greedy_scores)),
}


def _without_returns(name: str) -> Estimator:
    return lambda *inputs: AdvantageEstimate(_WITHOUT_CRITIC[name](*inputs))


ADVANTAGE_ESTIMATORS: dict[str, Estimator] = {
    "gae": _whitened_gae,
    **{name: _without_returns(name) for name in _WITHOUT_CRITIC},
}
"""Name -> f(token_rewards [B, R], response_mask [B, R], group_ids [B], options) -> :class:`AdvantageEstimate`.

``gae`` whitens its advantages over the batch, as is usual in PPO for language models.
"""


def _required(tensor: Tensor | None) -> Tensor:
    assert tensor is not None, "an input that this estimator needs; see EstimatorOptions"
    return tensor


__all__ = [
    "ADVANTAGE_ESTIMATORS",
    "AdvantageEstimate",
    "EstimatorOptions",
    "gae_advantages",
    "gpg_advantages",
    "grpo_advantages",
    "grpo_passk_advantages",
    "opo_advantages",
    "optimal_token_baseline_advantages",
    "reinforce_plus_plus_advantages",
    "reinforce_plus_plus_baseline_advantages",
    "remax_advantages",
    "rloo_advantages",
    "token_variances",
    "whitened",
]
