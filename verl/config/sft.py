"""Configuration of ``verl.trainer.main_sft``: the schema of ``configs/sft.yaml``."""

from dataclasses import dataclass
from typing import Annotated, Literal

from verl.config.checks import NAMES_ONE, Group, PositiveInt, Share
from verl.config.common import Device, ModelConfig, OptimConfig, RunConfig, Seed, check_workers


@dataclass(frozen=True)
class SFTDataConfig(Group):
    """Training and validation conversations."""

    train_files: Annotated[list[str], NAMES_ONE]
    """Training conversations: ``.parquet``, ``.jsonl`` or ``.json`` files, or hub datasets as
    ``owner/name:config:split``."""
    val_files: list[str]
    """Validation conversations, in the same format as ``train_files``; an empty list disables validation."""
    messages_key: str
    """Column with the chat messages, a list of ``{"role", "content"}``; the loss includes only the assistant turns.
    Tool calls and the column ``tools`` are also supported (docs/data.md)."""
    train_batch_size: PositiveInt
    """Number of conversations per optimizer step over all workers."""
    micro_batch_size_per_gpu: PositiveInt
    """Number of conversations per forward and backward pass on one worker; affects memory and speed, not gradients."""
    max_length: PositiveInt
    """Maximum conversation length in tokens."""
    truncation: Literal["error", "right"]
    """Handling of overlong conversations: ``error`` ends the run before training, ``right`` drops the last tokens."""


@dataclass(frozen=True)
class SFTTrainerConfig(RunConfig):
    """Run options of supervised fine-tuning."""

    stop_at_sequence_probability: Share
    """Stop at the first validation in which ``val/sequence_probability`` reaches this value; 1 never stops early. The
    metric is the mean probability of sampling exactly the assistant turns of a conversation at temperature 1."""


@dataclass(frozen=True)
class SFTConfig(Group):
    """All options of one run of ``verl.trainer.main_sft``."""

    device: Device
    """Device: ``auto`` uses CUDA (nccl) if there is a GPU, else the CPU (gloo); ``cpu`` and ``cuda`` force a choice."""
    seed: Seed
    """Seed for all randomness: example order and initialisation."""
    data: SFTDataConfig
    model: ModelConfig
    optim: OptimConfig
    trainer: SFTTrainerConfig

    def check(self) -> None:
        for workers in self.trainer.world_sizes:
            check_workers(self.model, "model", workers)
        early = self.trainer.stop_at_sequence_probability < 1
        self.require(
            not early or (len(self.data.val_files) > 0 and self.trainer.test_freq >= 0),
            "trainer.stop_at_sequence_probability",
            "stopping early needs validation; set data.val_files and trainer.test_freq>=0",
        )
