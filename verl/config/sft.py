"""Configuration of ``verl.trainer.main_sft``: the schema of ``configs/sft.yaml``."""

from dataclasses import dataclass

from verl.config.checks import require, require_choice, require_positive
from verl.config.common import (
    DEVICES,
    ModelConfig,
    OptimConfig,
    RunConfig,
    check_divisible,
    check_workers,
    require_seed,
)


@dataclass(frozen=True)
class SFTDataConfig:
    """Conversations to learn from."""

    train_files: list[str]
    """Parquet files of training conversations."""
    val_files: list[str]
    """Parquet files of held-out conversations; may be empty, then nothing is validated."""
    messages_key: str
    """Column that holds the chat messages, a list of ``{"role", "content"}``; the assistant's turns are learned."""
    train_batch_size: int
    """Conversations per optimizer step, over all workers."""
    micro_batch_size_per_gpu: int
    """Conversations per forward and backward on one worker; changes memory and speed, never the gradient."""
    max_length: int
    """Longest conversation in tokens."""
    truncation: str
    """A conversation that is too long: ``error`` stops before training, ``right`` drops its last tokens."""

    def __post_init__(self) -> None:
        require(len(self.train_files) > 0, "data.train_files", self.train_files, "name at least one parquet file")
        for field in ("train_batch_size", "micro_batch_size_per_gpu", "max_length"):
            require_positive(f"data.{field}", getattr(self, field))
        require_choice("data.truncation", self.truncation, ["error", "right"])


@dataclass(frozen=True)
class SFTTrainerConfig(RunConfig):
    """A run of supervised fine-tuning."""

    stop_at_sequence_probability: float
    """Stop at the first validation whose ``val/sequence_probability`` reaches this; 1 never stops early.

    The sequence probability is the mean over held-out conversations of the probability that sampling at temperature 1
    reproduces the assistant's turns exactly: where the answer determines its derivation, it is sampled pass@1.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        target = self.stop_at_sequence_probability
        require(0 < target <= 1, "trainer.stop_at_sequence_probability", target, "must be in (0, 1]")


@dataclass(frozen=True)
class SFTConfig:
    """Everything one run of ``verl.trainer.main_sft`` depends on."""

    device: str
    """``auto`` takes CUDA with nccl where there is a GPU, else the CPU with gloo; ``cpu`` or ``cuda`` force one."""
    seed: int
    """Seed of every random choice: example order, initialisation."""
    data: SFTDataConfig
    model: ModelConfig
    optim: OptimConfig
    trainer: SFTTrainerConfig

    def __post_init__(self) -> None:
        require_choice("device", self.device, DEVICES)
        require_seed(self.seed)
        world = "trainer.nnodes*trainer.n_gpus_per_node"
        check_divisible("data.train_batch_size", self.data.train_batch_size, world, self.trainer.world_size)
        check_workers(self.model, "model", self.trainer.world_size)
        early = self.trainer.stop_at_sequence_probability < 1
        require(
            not early or (len(self.data.val_files) > 0 and self.trainer.test_freq >= 0),
            "trainer.stop_at_sequence_probability",
            self.trainer.stop_at_sequence_probability,
            "stopping early needs validation; set data.val_files and trainer.test_freq>=0",
        )
