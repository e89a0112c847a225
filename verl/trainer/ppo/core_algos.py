"""The algorithms by name, where users of veRL look for them; they live in ``verl.algorithms``."""

from verl.algorithms.advantages import ADVANTAGE_ESTIMATORS
from verl.algorithms.kl import KL_ESTIMATORS
from verl.algorithms.losses import POLICY_LOSSES, token_mean
from verl.algorithms.shaping import shaped_advantages

__all__ = ["ADVANTAGE_ESTIMATORS", "KL_ESTIMATORS", "POLICY_LOSSES", "shaped_advantages", "token_mean"]
