"""The reward manager, where readers of the paper's release look for it; it lives in ``verl.rank.reward_manager``."""

from verl.rank.reward_manager import RewardManager

__all__ = ["RewardManager"]
