"""Steps of the training loop, over workers that only note what they are asked."""

from dataclasses import replace

import pytest

from verl.config import PPOConfig
from verl.trainer.ppo.ray_trainer import RayPPOTrainer


class Noted:
    """Sampler, workers and policy in one; ``calls`` are what was asked, in order."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def generate(self, *_: object) -> None:
        self.calls.append("generate")

    def run(self, method: str) -> None:
        self.calls.append(method)

    def logprobs(self, _rollout: None) -> None:
        self.calls.append("logprobs")


@pytest.mark.parametrize(
    ("source", "calls"), [("rollout", ["generate"]), ("actor", ["generate", "finish_generation", "logprobs"])]
)
def test_the_engine_makes_room_where_the_policy_measures_validation(small_config: PPOConfig, source: str, calls):
    trainer, noted = RayPPOTrainer.__new__(RayPPOTrainer), Noted()
    trainer.config = replace(small_config, calculator=replace(small_config.calculator, source=source))
    trainer.sampler = trainer.workers = noted
    trainer._logprobs = noted.logprobs
    trainer._generate_for_validation(None)
    assert noted.calls == calls
