"""A worker that learns without a rollout engine, to be saved and loaded."""

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import torch
from torch import Tensor

from verl.batch import Batch
from verl.checkpoint.shards import CheckpointWorker, TrainedPart, trained_parameters, training_state
from verl.config import PPOConfig
from verl.models.forward import LogprobForward, ValueForward
from verl.models.fsdp import offloaded_parameters
from verl.models.huggingface import WeightFiles
from verl.models.learner import Learner
from verl.models.loading import load_sharded_model, load_sharded_value_model
from verl.models.offload import local_part
from verl.models.output_head import Scoring
from verl.models.tokenizer import load_tokenizer
from verl.utils.distributed import WorkerPlace, join_world, seed_everything

TOTAL_STEPS = 10


class LearningWorker(CheckpointWorker):
    """An actor with its moving average, and a critic, on fixed tokens.

    The critic's head has one row, so that all ranks but the first hold none of it.
    """

    def __init__(self, config: PPOConfig, place: WorkerPlace) -> None:
        seed_everything(config.seed)
        mesh = join_world(place)
        self.rank, self.world_size = place.rank, place.world_size
        optim = replace(config.actor.optim, lr=1e-3, lr_warmup_steps=2, lr_scheduler_type="cosine")
        actor = load_sharded_model(config.model, mesh, trainable=True)
        critic = load_sharded_value_model(config.model, mesh, trainable=True)
        self.learners = {"actor": Learner(actor, optim, TOTAL_STEPS), "critic": Learner(critic, optim, TOTAL_STEPS)}
        self.logprobs = LogprobForward(actor, config.model, "cpu").logprobs
        self.values = ValueForward(critic, config.model, "cpu").values
        tokenizer = load_tokenizer(config.model.path, False)
        parts = [
            TrainedPart(name, learner, offloaded_parameters(learner.model, False), config.model, tokenizer)
            for name, learner in self.learners.items()
        ]
        self.average = load_sharded_model(config.model, mesh, trainable=True)
        kept = SimpleNamespace(model=self.average, parameters=offloaded_parameters(self.average, False))
        super().__init__(parts, config.seed, {"teacher": kept})

    def learn(self, batch: Tensor, steps: int, names: list[str]) -> list[dict[str, float]]:
        """Optimizer steps on ``batch`` [B, S] of tokens, of which every rank takes its share; what each reports."""
        share = batch.tensor_split(self.world_size)[self.rank]
        rows = share.tolist()
        texts = Batch.of([row[:1] for row in rows], [row[1:] for row in rows])
        curve = []
        for _ in range(steps):
            record: dict[str, float] = {}
            for name in names:
                learner = self.learners[name]
                if name == "actor":
                    errors = -texts.pad(self.logprobs(texts, Scoring(1.0)).logprobs)
                else:
                    errors = (self.values(texts) - 1).square()
                loss = errors.sum() / batch.numel()
                sums, state = learner.step([loss], lambda loss: (loss, {"loss": loss}))
                record |= {f"{name}/{key}": value for key, value in (sums | state).items()}
            parameters = (self.average.parameters(), self.learners["actor"].model.parameters())
            for average, current in zip(*parameters, strict=True):
                local_part(average.data).lerp_(local_part(current.data), 0.25)
            curve.append(record)
        return curve

    def whole_state(self) -> dict[str, Tensor]:
        """Every tensor that is trained or helps to, whole."""
        states = {name: training_state(learner) for name, learner in self.learners.items()}
        states["teacher"] = trained_parameters(self.average)
        return {
            f"{name}.{key}": value.full_tensor() if hasattr(value, "full_tensor") else value.clone()
            for name, state in states.items()
            for key, value in state.items()
        }

    def draw(self) -> list[Any]:
        """What the global generators give next."""
        return [random.random(), float(np.random.random()), float(torch.rand(()))]

    def export_in_files_of(self, num_bytes: int) -> None:
        """Cut exports into smaller files, of which there are then several."""
        for name, files in self._exports.items():
            self._exports[name] = WeightFiles(files.model, num_bytes)

    def stop_writing(self) -> None:
        """Let nothing be written from now on."""
        self._write = Mock(side_effect=OSError(28, "No space left on device"))
