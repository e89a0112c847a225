"""Policy losses by name, and how per-token losses become one number."""

from verl.algorithms.losses.aggregate import token_mean
from verl.algorithms.losses.ppo_clip import ppo_clip_loss

POLICY_LOSSES = {"ppo_clip": ppo_clip_loss}

__all__ = ["POLICY_LOSSES", "ppo_clip_loss", "token_mean"]
