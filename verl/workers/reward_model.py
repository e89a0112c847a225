"""Reward model worker for evaluations."""

from verl.config.rewards import RewardModelConfig
from verl.utils.distributed import WorkerPlace, join_world, seed_everything
from verl.workers.critic import RewardModel


class RewardModelWorker:
    """One of the processes over which the reward model is sharded."""

    def __init__(self, config: RewardModelConfig, place: WorkerPlace) -> None:
        seed_everything(0)
        self.reward_model = RewardModel(config, join_world(place))
