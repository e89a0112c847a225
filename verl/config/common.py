"""Configuration that reinforcement learning and supervised fine-tuning share."""

from dataclasses import dataclass

from verl.config.checks import require, require_choice, require_positive

LOGGERS = ["console", "tensorboard", "wandb"]
DEVICES = ["auto", "cpu", "cuda"]


@dataclass(frozen=True)
class ModelConfig:
    """The policy and how its weights are held while training."""

    path: str
    """A Hugging Face model: a local folder or a hub id."""
    param_dtype: str
    """Precision of matrix products, forward and backward: ``float32`` or ``bfloat16``; master weights stay float32."""
    attn_implementation: str
    """Attention kernel by its ``transformers`` name: ``sdpa``, ``eager``, ``flash_attention_2``, ..."""
    trust_remote_code: bool
    """Allow code shipped inside the model folder to run."""

    def __post_init__(self) -> None:
        require(bool(self.path), "model.path", self.path, "name a model folder or a hub id")
        require_choice("model.param_dtype", self.param_dtype, ["float32", "bfloat16"])


@dataclass(frozen=True)
class OptimConfig:
    """AdamW and its learning-rate schedule."""

    lr: float
    """Peak learning rate."""
    betas: list[float]
    """AdamW's two decay rates."""
    weight_decay: float
    """Decoupled weight decay."""
    lr_scheduler_type: str
    """``constant``, ``linear`` or ``cosine`` decay after the warm-up."""
    lr_warmup_steps: int
    """Optimizer steps of linear warm-up from 0."""
    min_lr_ratio: float
    """The decay ends at ``lr * min_lr_ratio``."""
    grad_clip: float
    """Largest global gradient norm; larger gradients are scaled down to it."""

    def __post_init__(self) -> None:
        require_positive("optim.lr", self.lr)
        require(len(self.betas) == 2, "optim.betas", self.betas, "needs two numbers")
        require(
            self.lr_scheduler_type in ("constant", "linear", "cosine"),
            "optim.lr_scheduler_type",
            self.lr_scheduler_type,
            "must be one of constant, linear, cosine",
        )
        require(self.lr_warmup_steps >= 0, "optim.lr_warmup_steps", self.lr_warmup_steps, "must be at least 0")
        require(0 <= self.min_lr_ratio <= 1, "optim.min_lr_ratio", self.min_lr_ratio, "must be in [0, 1]")
        require_positive("optim.grad_clip", self.grad_clip)


@dataclass(frozen=True)
class EngineConfig:
    """A vLLM engine inside each worker; the group ``rollout`` of a job."""

    dtype: str
    """vLLM's weight precision: ``auto`` (float32 on CPU, bfloat16 on GPU), ``float32``, ``bfloat16`` or ``float16``."""
    enforce_eager: bool
    """Run without CUDA graphs and compilation. A CPU engine always does: compiling there takes a C++ compiler."""
    gpu_memory_utilization: float
    """Share of the GPU's memory that vLLM takes, weights included. Not used on CPU."""
    kv_cache_memory_mb: int
    """Size of the KV cache in MiB per worker. 0: what ``gpu_memory_utilization`` leaves on GPU, 512 MiB on CPU."""
    max_num_seqs: int
    """Most sequences decoded at once per engine."""
    max_num_batched_tokens: int
    """Most tokens one engine step computes; at least one whole sequence. On a CPU prompts are not split."""

    def __post_init__(self) -> None:
        require_choice("rollout.dtype", self.dtype, ["auto", "float32", "bfloat16", "float16"])
        share = self.gpu_memory_utilization
        require(0 < share < 1, "rollout.gpu_memory_utilization", share, "must be in (0, 1)")
        memory = self.kv_cache_memory_mb
        require(memory >= 0, "rollout.kv_cache_memory_mb", memory, "must not be negative")
        require_positive("rollout.max_num_seqs", self.max_num_seqs)
        require(
            self.max_num_batched_tokens >= self.max_num_seqs,
            "rollout.max_num_batched_tokens",
            self.max_num_batched_tokens,
            f"must be at least rollout.max_num_seqs={self.max_num_seqs}",
        )


@dataclass(frozen=True)
class RunConfig:
    """Length of a run, its workers, and what it leaves behind."""

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
    """Passes over the training data."""
    total_training_steps: int
    """Stop after this many steps; 0 leaves it to ``total_epochs``."""
    test_freq: int
    """Validate every so many steps, and always after the last; 0: only then."""
    save_freq: int
    """Save a checkpoint every so many steps, and always after the last; 0: only then."""

    def __post_init__(self) -> None:
        for name in self.logger:
            require_choice("trainer.logger", name, LOGGERS)
        for field in ("nnodes", "n_gpus_per_node", "total_epochs"):
            require_positive(f"trainer.{field}", getattr(self, field))
        for field in ("total_training_steps", "test_freq", "save_freq"):
            require(getattr(self, field) >= 0, f"trainer.{field}", getattr(self, field), "must not be negative")

    @property
    def world_size(self) -> int:
        """Number of workers."""
        return self.nnodes * self.n_gpus_per_node

    def num_steps(self, steps_per_epoch: int) -> int:
        """Steps of the whole run: ``total_epochs`` passes, or ``total_training_steps`` if that is set and fewer."""
        by_epochs = self.total_epochs * steps_per_epoch
        return min(self.total_training_steps, by_epochs) if self.total_training_steps else by_epochs


def require_seed(seed: int) -> None:
    """Raise ``ValueError`` for a seed that a random generator would refuse."""
    require(0 <= seed < 2**32, "seed", seed, "must be from 0 to 4294967295")


def check_divisible(field: str, value: int, divisor_name: str, divisor: int) -> None:
    """Raise ``ValueError`` naming both fields unless ``divisor`` divides ``value``."""
    nearest = max(divisor, round(value / divisor) * divisor)
    require(
        value % divisor == 0,
        field,
        value,
        f"must be divisible by {divisor_name}={divisor}; the nearest value that is: {nearest}",
    )
