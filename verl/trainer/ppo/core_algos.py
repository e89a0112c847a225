"""The algorithms by name, where users of veRL look for them. The code is in ``verl.algorithms``."""

from verl.algorithms.advantages import ADVANTAGE_ESTIMATORS, EstimatorOptions
from verl.algorithms.advantages.estimators import gae_advantages, token_variances
from verl.algorithms.kl import KL_ESTIMATORS, KLController, kl_penalised_rewards
from verl.algorithms.losses import LOSS_AGGREGATIONS, POLICY_LOSSES, StepSize, token_mean
from verl.algorithms.rollout_correction import mean_rollout_weight, rollout_weights
from verl.algorithms.scores import overlong_penalty
from verl.rank.shaping import shaped_advantages

__all__ = [
    "ADVANTAGE_ESTIMATORS",
    "KL_ESTIMATORS",
    "LOSS_AGGREGATIONS",
    "POLICY_LOSSES",
    "EstimatorOptions",
    "KLController",
    "StepSize",
    "gae_advantages",
    "kl_penalised_rewards",
    "mean_rollout_weight",
    "overlong_penalty",
    "rollout_weights",
    "shaped_advantages",
    "token_mean",
    "token_variances",
]
