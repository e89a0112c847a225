"""Loads the teacher of on-policy distillation."""

from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedTokenizerBase

from verl.config.ppo import PPOConfig
from verl.models.info import ModelInfo
from verl.models.policy import Policy, scoring_batches


def load_teacher(config: PPOConfig, mesh: DeviceMesh, tokenizer: PreTrainedTokenizerBase) -> Policy:
    """Load the frozen model ``teacher.model``, which scores what the policy with this ``tokenizer`` samples.

    If the output heads have different sizes, because their padding differs, both are compared on the tokenizer's
    tokens, and the teacher's probabilities are normalised over these.
    """
    model = config.teacher.model
    rows = {ModelInfo.of(other).text_config.vocab_size for other in (config.model, model)}
    vocabulary = None if len(rows) == 1 else max(tokenizer.get_vocab().values()) + 1
    scoring, temperature = scoring_batches(config.actor, model), config.rollout.temperature
    return Policy(model, mesh, scoring, temperature, trainable=False, vocabulary=vocabulary)
