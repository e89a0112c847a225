"""Configuration of ``verl.trainer.main_sft``: the schema of ``configs/sft.yaml``."""

from dataclasses import dataclass

from verl.config.checks import require, require_choice, require_positive
from verl.config.common import DEVICES, ModelConfig, OptimConfig, check_divisible, check_loggers


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
class SFTTrainerConfig:
    """Length of the run, its workers, and what it leaves behind."""

    project_name: str
    """Project under which trackers file the run."""
    experiment_name: str
    """Name of the run in trackers."""
    default_local_dir: str
    """Folder of everything the run leaves behind; must be new or empty."""
    logger: list[str]
    """Trackers besides ``metrics.jsonl``, which is always written: ``console``, ``tensorboard``, ``wandb``."""
    nnodes: int
    """Machines of the Ray cluster to use."""
    n_gpus_per_node: int
    """Workers per machine: one per GPU, or that many CPU processes."""
    total_epochs: int
    """Passes over the training conversations."""
    total_training_steps: int
    """Stop after this many steps; 0 leaves it to ``total_epochs``."""
    test_freq: int
    """Validate every so many steps, and always after the last; 0: only then."""
    save_freq: int
    """Save a checkpoint every so many steps, and always after the last; 0: only then."""
    stop_at_sequence_probability: float
    """Stop at the first validation whose ``val/sequence_probability`` reaches this; 1 never stops early.

    The sequence probability is the mean over held-out conversations of the probability that sampling at temperature 1
    reproduces the assistant's turns exactly: where the answer determines its derivation, it is sampled pass@1.
    """

    def __post_init__(self) -> None:
        check_loggers(self.logger)
        for field in ("nnodes", "n_gpus_per_node", "total_epochs"):
            require_positive(f"trainer.{field}", getattr(self, field))
        for field in ("total_training_steps", "test_freq", "save_freq"):
            require(getattr(self, field) >= 0, f"trainer.{field}", getattr(self, field), "must not be negative")
        target = self.stop_at_sequence_probability
        require(0 < target <= 1, "trainer.stop_at_sequence_probability", target, "must be in (0, 1]")

    @property
    def world_size(self) -> int:
        """Number of workers."""
        return self.nnodes * self.n_gpus_per_node


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
        world = "trainer.nnodes*trainer.n_gpus_per_node"
        check_divisible("data.train_batch_size", self.data.train_batch_size, world, self.trainer.world_size)
        early = self.trainer.stop_at_sequence_probability < 1
        require(
            not early or len(self.data.val_files) > 0,
            "trainer.stop_at_sequence_probability",
            self.trainer.stop_at_sequence_probability,
            "stopping early needs held-out conversations; set data.val_files",
        )
