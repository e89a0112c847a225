"""A trainer with a recorded policy, and batches for it."""

from contextlib import nullcontext
from types import SimpleNamespace

import torch

from tests.kit import changed, ppo_config
from verl.batch import Batch
from verl.rank.reward_manager import RewardManager
from verl.trainer.logging.speed import PhaseTimer
from verl.trainer.ppo.advantages import AdvantageEstimation
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.ppo.teaching import Teaching
from verl.trainer.ppo.updates import Updates
from verl.workers.policy_loss import CustomLoss


def batch_of(learned: list[list[int]], **columns) -> Batch:
    """Responses of as many tokens as each row of ``learned`` has; the tokens of row i are i."""
    lengths = torch.tensor([len(row) for row in learned])
    tokens = torch.arange(len(learned)).repeat_interleave(lengths)
    mask = torch.tensor([entry for row in learned for entry in row]).bool()
    batch = Batch(torch.zeros_like(lengths), lengths, tokens=tokens, learn_mask=mask)
    return batch.fill(truncated=torch.zeros(len(learned), dtype=torch.bool)).fill(**columns)


def flat(values: list[float]) -> torch.Tensor:
    return torch.tensor(values)


def weighted(**options) -> list[str]:
    return [f"algorithm.rollout_correction.{name}={value}" for name, value in options.items()]


def estimation(*options: str, **algorithm) -> AdvantageEstimation:
    config = changed(ppo_config(*options), algorithm=algorithm)
    return AdvantageEstimation(config, RewardManager(config.reward_manager))


class RecordedPolicy:
    """Says -i of the tokens of row i, and notes what it is given."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[float]]] = []
        self.advantages: list[list[float]] = []

    def _scores(self, batch: Batch) -> Batch:
        values = -batch.tokens.float()
        return batch.columns().fill(logprobs=values, entropy=-values)

    def compute_logprobs(self, batch: Batch) -> Batch:
        self.calls.append(("score", batch.tokens[::2].tolist()))
        return self._scores(batch)

    def run_update(self, method: str, batch: Batch, *_: int) -> dict[str, float]:
        assert method == "actor.update"
        self.calls.append(("update", batch.old_logprobs[::2].tolist()))
        self.advantages.append(batch.advantages.tolist())
        return {"a": float(len(self.advantages)), "actor/skipped_updates": 0.0}

    def run_scoring_update(self, method: str, batch: Batch, *_: int) -> tuple[dict[str, float], Batch]:
        assert method == "actor.update_on_policy" and batch.old_logprobs.isnan().all()
        self.calls.append(("update on policy", batch.tokens[::2].tolist()))
        return {"actor/skipped_updates": 0.0}, self._scores(batch)


def trainer_of(options: list[str], replays: bool = False) -> RayPPOTrainer:
    """A trainer at step 1 whose policy is recorded; ``replays``: its method chooses what to learn from."""
    trainer = object.__new__(RayPPOTrainer)
    config = trainer.config = ppo_config("rollout.n=1", "actor.use_kl_loss=false", *options)
    trainer.loss, trainer.policy = CustomLoss(config.actor), RecordedPolicy()
    trainer.critic = trainer.pool = None
    trainer.workers, trainer.listed_operations = SimpleNamespace(run=lambda *_: None), True
    trainer.policy.workers = trainer.workers
    trainer.method = SimpleNamespace(overrides=lambda name: replays and name == "learn_from")
    trainer.timer, trainer.step, trainer.metrics = PhaseTimer(lambda _: nullcontext(), lambda: None), 1, {}
    trainer.updates = Updates(config, trainer.policy, None, trainer.loss, trainer.timer)
    teachers = (config.teacher, None, [], trainer.policy, trainer.timer)
    trainer.teaching = Teaching(*teachers) if config.uses_teacher else None
    return trainer


def three(replayed: bool = False) -> Batch:
    """Three responses of two tokens, sampled at -1; the last one in an earlier step where ``replayed``."""
    return batch_of([[1, 1]] * 3).fill(
        rollout_logprobs=-torch.ones(6), step=torch.tensor([1, 1, 0 if replayed else 1]), advantages=torch.ones(6)
    )
