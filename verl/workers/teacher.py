"""Loads and updates the teacher for on-policy distillation."""

from dataclasses import replace

import torch
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedTokenizerBase

from verl.config.common import ModelConfig
from verl.config.ppo import PPOConfig
from verl.models.info import ModelInfo
from verl.models.offload import local_part, reshard
from verl.models.policy import Policy, scoring_batches
from verl.models.tokenizer import num_ids


def load_teachers(config: PPOConfig, mesh: DeviceMesh, tokenizer: PreTrainedTokenizerBase) -> list[Policy]:
    """Load the frozen models ``teacher.models``, which score the policy's responses. ``tokenizer`` is the policy's."""
    return [_load(config, model, mesh, tokenizer) for model in config.teacher.models.values()]


def _load(config: PPOConfig, model: ModelConfig, mesh: DeviceMesh, tokenizer: PreTrainedTokenizerBase) -> Policy:
    """Load a frozen teacher.

    If padding makes the output heads of policy and teacher differ in size, the loss compares only the tokenizer's
    tokens, and the teacher's probabilities are normalised over these tokens.
    """
    rows = {ModelInfo.of(other).text_config.vocab_size for other in (config.model, model)}
    vocabulary = None if len(rows) == 1 else num_ids(tokenizer)
    scoring, temperature = scoring_batches(config.actor, model), config.rollout.temperature
    return Policy(model, mesh, scoring, temperature, trainable=False, vocabulary=vocabulary)


class MovingAverage(Policy):
    """Teacher whose weights are a moving average of the policy's weights, in float32 and with the same sharding."""

    def __init__(self, config: PPOConfig, mesh: DeviceMesh, policy: Policy) -> None:
        """Copy the weights of ``policy``."""
        fsdp = replace(config.model.fsdp, param_offload=config.teacher.model.fsdp.param_offload)
        model = replace(config.model, fsdp=fsdp)
        scoring, temperature = scoring_batches(config.actor, model), config.rollout.temperature
        with policy.parameters.loaded():
            # Frozen weights would be rounded to the precision of the forward pass.
            super().__init__(model, mesh, scoring, temperature, trainable=True, source=policy.model)
        self.policy = policy

    @torch.no_grad()
    def update(self, rate: float) -> None:
        """Set every weight to (1 - rate) * average + rate * policy."""
        with self.parameters.loaded(), self.policy.parameters.loaded():
            reshard(self.model)
            reshard(self.policy.model)
            pairs = zip(self.model.parameters(), self.policy.model.parameters(), strict=True)
            for average, current in pairs:
                local_part(average).lerp_(local_part(current), rate)
