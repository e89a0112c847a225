"""Aliases of the worker classes, with the names used in the paper's release."""

from verl.workers.critic import Critic as CriticWorker
from verl.workers.critic import RewardModel as RewardModelWorker
from verl.workers.hybrid import HybridWorker as ActorRolloutRefWorker

__all__ = ["ActorRolloutRefWorker", "CriticWorker", "RewardModelWorker"]
