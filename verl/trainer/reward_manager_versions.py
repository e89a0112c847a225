"""Alias for ``verl.rank.reward_manager`` at its path in the paper's release."""

from verl.rank.reward_manager import RewardManager

__all__ = ["RewardManager"]
