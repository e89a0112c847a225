"""Alias for ``verl.rank.reward_manager`` under the module path of the paper's release."""

from verl.rank.reward_manager import RewardManager

__all__ = ["RewardManager"]
