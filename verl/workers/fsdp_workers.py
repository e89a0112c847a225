"""The workers' classes, where readers of the paper's release look for them; they live in the modules beside it."""

from verl.workers.critic import Critic as CriticWorker
from verl.workers.critic import RewardModel as RewardModelWorker
from verl.workers.hybrid import HybridWorker as ActorRolloutRefWorker

__all__ = ["ActorRolloutRefWorker", "CriticWorker", "RewardModelWorker"]
