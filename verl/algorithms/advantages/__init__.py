"""Advantage estimators by name: ``algorithm.adv_estimator`` selects one."""

from verl.algorithms.advantages.grpo import grpo_advantages

ADVANTAGE_ESTIMATORS = {"grpo": grpo_advantages}

__all__ = ["ADVANTAGE_ESTIMATORS", "grpo_advantages"]
