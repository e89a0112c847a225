"""Configuration of ``verl.trainer.main_sft``: the schema of ``configs/sft.yaml``."""

from dataclasses import dataclass
from typing import Literal

from verl.config.checks import require, require_positive
from verl.config.common import Device, ModelConfig, OptimConfig, RunConfig, check_workers, require_seed


@dataclass(frozen=True)
class SFTDataConfig:
    """Conversations to learn from."""

    train_files: list[str]
    """Training conversations: ``.parquet``, ``.jsonl`` or ``.json`` files, or sets of the Hugging Face hub as
    ``owner/name:config:split``."""
    val_files: list[str]
    """Held-out conversations, named in the same way; without any, nothing is validated."""
    messages_key: str
    """Column of the chat messages, a list of ``{"role", "content"}``; the model learns the assistant's turns."""
    train_batch_size: int
    """Conversations per optimizer step, over all workers."""
    micro_batch_size_per_gpu: int
    """Conversations per forward and backward pass on one worker; changes memory and speed, never the gradient."""
    max_length: int
    """Longest conversation in tokens."""
    truncation: Literal["error", "right"]
    """What to do with a conversation that is too long: ``error`` ends the run before training, ``right`` drops the last
    tokens."""

    def __post_init__(self) -> None:
        require(len(self.train_files) > 0, "data.train_files", self.train_files, "name at least one file")
        for field in ("train_batch_size", "micro_batch_size_per_gpu", "max_length"):
            require_positive(f"data.{field}", getattr(self, field))


@dataclass(frozen=True)
class SFTTrainerConfig(RunConfig):
    """A run of supervised fine-tuning."""

    stop_at_sequence_probability: float
    """Stop at the first validation whose ``val/sequence_probability`` reaches this value; 1 never stops early. It is
    the probability that sampling at temperature 1 reproduces a held-out conversation's assistant turns exactly, on
    average over these conversations."""

    def __post_init__(self) -> None:
        super().__post_init__()
        target = self.stop_at_sequence_probability
        require(0 < target <= 1, "trainer.stop_at_sequence_probability", target, "must be in (0, 1]")


@dataclass(frozen=True)
class SFTConfig:
    """Everything one run of ``verl.trainer.main_sft`` depends on."""

    device: Device
    """``auto``: CUDA with nccl if there is a GPU, else the CPU with gloo; ``cpu`` and ``cuda`` force one."""
    seed: int
    """Seed of every random choice: example order, initialisation."""
    data: SFTDataConfig
    model: ModelConfig
    optim: OptimConfig
    trainer: SFTTrainerConfig

    def __post_init__(self) -> None:
        require_seed(self.seed)
        for workers in self.trainer.world_sizes:
            check_workers(self.model, "model", workers)
        early = self.trainer.stop_at_sequence_probability < 1
        require(
            not early or (len(self.data.val_files) > 0 and self.trainer.test_freq >= 0),
            "trainer.stop_at_sequence_probability",
            self.trainer.stop_at_sequence_probability,
            "stopping early needs validation; set data.val_files and trainer.test_freq>=0",
        )
