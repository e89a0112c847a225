"""Advantage estimators by name: ``algorithm.adv_estimator`` selects one."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from verl.algorithms.advantages.gae import gae_advantages
from verl.algorithms.advantages.gpg import gpg_advantages
from verl.algorithms.advantages.grpo import grpo_advantages
from verl.algorithms.advantages.grpo_passk import grpo_passk_advantages
from verl.algorithms.advantages.opo import opo_advantages
from verl.algorithms.advantages.optimal_token_baseline import optimal_token_baseline_advantages, token_variances
from verl.algorithms.advantages.reinforce_plus_plus import reinforce_plus_plus_advantages
from verl.algorithms.advantages.reinforce_plus_plus_baseline import reinforce_plus_plus_baseline_advantages
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
    """Response tokens that contribute to the losses, ``[B, R]``: whitening and the scale of ``gpg`` are over these.
    The others count only in the statistics of their group."""
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
    advantages, returns = gae_advantages(rewards, _given(options.values), mask, options.gamma, options.lam)
    return AdvantageEstimate(whitened(advantages, options.learned_mask), returns)


def _token_baseline(zero_tail: bool) -> Estimator:
    def estimate(rewards: Tensor, mask: Tensor, groups: Tensor, options: EstimatorOptions) -> AdvantageEstimate:
        variances = _given(options.variances)
        return AdvantageEstimate(optimal_token_baseline_advantages(rewards, mask, groups, variances, zero_tail))

    return estimate


ADVANTAGE_ESTIMATORS: dict[str, Estimator] = {
    "grpo": lambda rewards, mask, groups, options: AdvantageEstimate(
        grpo_advantages(rewards, mask, groups, options.norm_by_std)
    ),
    "grpo_passk": lambda rewards, mask, groups, options: AdvantageEstimate(
        grpo_passk_advantages(rewards, mask, groups, options.norm_by_std)
    ),
    "gpg": lambda rewards, mask, groups, options: AdvantageEstimate(
        gpg_advantages(rewards, mask, groups, options.learned_mask)
    ),
    "opo": lambda rewards, mask, groups, _: AdvantageEstimate(opo_advantages(rewards, mask, groups)),
    "optimal_token_baseline": _token_baseline(zero_tail=False),
    "tir_optimal_token_baseline": _token_baseline(zero_tail=True),
    "rloo": lambda rewards, mask, groups, _: AdvantageEstimate(rloo_advantages(rewards, mask, groups)),
    "reinforce_plus_plus": lambda rewards, _, __, options: AdvantageEstimate(
        reinforce_plus_plus_advantages(rewards, options.learned_mask, options.gamma)
    ),
    "reinforce_plus_plus_baseline": lambda rewards, mask, groups, options: AdvantageEstimate(
        reinforce_plus_plus_baseline_advantages(rewards, mask, groups, options.learned_mask)
    ),
    "remax": lambda rewards, mask, _, options: AdvantageEstimate(
        remax_advantages(rewards, mask, _given(options.greedy_scores))
    ),
    "gae": _whitened_gae,
}
"""Name -> f(token_rewards [B, R], response_mask [B, R], group_ids [B], options) -> :class:`AdvantageEstimate`.

``gae`` whitens its advantages over the batch, as is usual in PPO for language models.
"""


def _given(tensor: Tensor | None) -> Tensor:
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
