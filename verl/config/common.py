"""Configuration that reinforcement learning and supervised fine-tuning share."""

from dataclasses import dataclass

from verl.config.checks import require, require_choice, require_positive

LOGGERS = ["console", "tensorboard", "wandb"]
DEVICES = ["auto", "cpu", "cuda"]
ALL_LINEAR = "all-linear"
"""What stands for every linear layer in ``lora.target_modules``."""
PACKED_ATTENTION = ["sdpa", "eager", "flash_attention_2", "flash_attention_3"]
"""Attention kernels that know where a row of a packed sequence ends."""


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters (arXiv 2106.09685) that are trained in place of the model."""

    rank: int
    """Rank of the adapters; 0: none, the whole model is trained."""
    alpha: float
    """An adapter's product is scaled by ``alpha / rank``."""
    target_modules: list[str]
    """Names of the linear layers that get an adapter, such as ``q_proj``; ``all-linear``: all but the output head."""

    def __post_init__(self) -> None:
        require(self.rank >= 0, "lora.rank", self.rank, "must not be negative")
        require_positive("lora.alpha", self.alpha)
        targets = self.target_modules
        require(len(targets) > 0, "lora.target_modules", targets, "name at least one")
        alone = ALL_LINEAR not in targets or len(targets) == 1
        require(alone, "lora.target_modules", targets, f"{ALL_LINEAR} stands for all; leave the others out")


@dataclass(frozen=True)
class FSDPConfig:
    """How a model's weights and optimizer are spread over workers and the host's memory."""

    fsdp_size: int
    """Workers that hold one copy of the model together, neighbours in rank; the copies are kept alike by averaging
    gradients (hybrid sharding). Divides the number of workers; -1: all workers hold one copy."""
    param_offload: bool
    """Keep parameters in the host's memory, page-locked, between the phases that use them. Gains nothing on a CPU."""
    optimizer_offload: bool
    """Keep the optimizer's state in the host's memory but during its step. Gains nothing on a CPU."""

    def __post_init__(self) -> None:
        require(self.fsdp_size == -1 or self.fsdp_size > 0, "fsdp.fsdp_size", self.fsdp_size, "must be -1 or above 0")


@dataclass(frozen=True)
class ModelConfig:
    """A model and how its weights are held while training."""

    path: str
    """A Hugging Face model: a local folder or a hub id."""
    param_dtype: str
    """Precision of matrix products, forward and backward: ``float32`` or ``bfloat16``; master weights stay float32."""
    attn_implementation: str
    """Attention kernel by its ``transformers`` name: ``sdpa``, ``eager``, ``flash_attention_2``, ..."""
    trust_remote_code: bool
    """Allow code shipped inside the model folder to run."""
    gradient_checkpointing: bool
    """Keep one activation per decoder layer and compute the others again in the backward pass: less memory, about a
    third more time. The gradient does not depend on it."""
    use_remove_padding: bool
    """Join the rows of a micro-batch into one sequence without padding. Results do not depend on it."""
    use_liger: bool
    """Use the Liger kernels (norms, rotary embedding, gated linear units), where the package ``liger-kernel`` is
    installed; GPU only."""
    ulysses_sequence_parallel_size: int
    """Workers, neighbours in rank, that share the tokens of each sequence (DeepSpeed-Ulysses, arXiv 2309.14509).
    Divides the number of workers and of attention heads; above 1 it needs ``use_remove_padding``."""
    logits_chunk_size: int
    """Tokens whose logits exist at the same time, on one worker: log-probabilities and entropies are computed piece by
    piece. 0: all of a micro-batch."""
    lora: LoraConfig
    fsdp: FSDPConfig

    def __post_init__(self) -> None:
        size = self.ulysses_sequence_parallel_size
        require_positive("model.ulysses_sequence_parallel_size", size)
        require(
            size == 1 or self.use_remove_padding,
            "model.ulysses_sequence_parallel_size",
            size,
            "sequences are shared without padding; set model.use_remove_padding=true",
        )
        if self.use_remove_padding:
            require_choice("model.attn_implementation", self.attn_implementation, PACKED_ATTENTION)
        require(self.logits_chunk_size >= 0, "model.logits_chunk_size", self.logits_chunk_size, "must not be negative")
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
    tensor_parallel_size: int
    """Workers, neighbours in rank, that hold one copy of the model together; the workers divided by it are as many
    engines side by side."""

    def __post_init__(self) -> None:
        require_choice("rollout.dtype", self.dtype, ["auto", "float32", "bfloat16", "float16"])
        share = self.gpu_memory_utilization
        require(0 < share < 1, "rollout.gpu_memory_utilization", share, "must be in (0, 1)")
        memory = self.kv_cache_memory_mb
        require(memory >= 0, "rollout.kv_cache_memory_mb", memory, "must not be negative")
        require_positive("rollout.max_num_seqs", self.max_num_seqs)
        require_positive("rollout.tensor_parallel_size", self.tensor_parallel_size)
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
    """Folder of everything the run leaves behind. One that holds an unfinished run: see ``resume_mode``."""
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
    """Validate every so many steps and after the last; 0: only after the last; -1: never."""
    save_freq: int
    """Save a checkpoint every so many steps and after the last; 0: only after the last; -1: never."""
    resume_mode: str
    """``auto``: resume from the latest complete checkpoint in ``default_local_dir``, or start where there is none;
    ``disable``: the folder must be new or empty; ``path``: resume from ``resume_from_path``."""
    resume_from_path: str | None
    """Folder of a checkpoint, ``.../global_step_N``, of this run or another; used with ``resume_mode=path``."""
    max_ckpt_to_keep: int
    """Keep this many of the newest checkpoints, and the best one; older ones are removed once a new one is complete.
    0: keep all."""
    save_hf_model: bool
    """Also write the model as ``transformers`` and vLLM load it into each checkpoint, as ``actor/huggingface``. If
    false, ``python -m verl.trainer.main_export`` can write it later."""
    async_save: bool
    """Copy a checkpoint to the host's memory and write it to disk while training continues."""
    profile_steps: list[int]
    """Steps of which each worker writes a torch profiler trace to ``profile/``."""
    peak_tflops: float
    """Peak speed of one device in 10^12 operations a second at ``param_dtype``, for the model FLOPs utilisation; 0:
    looked up by the GPU's name, and nothing is logged for an unknown device."""

    def __post_init__(self) -> None:
        for name in self.logger:
            require_choice("trainer.logger", name, LOGGERS)
        for field in ("nnodes", "n_gpus_per_node", "total_epochs"):
            require_positive(f"trainer.{field}", getattr(self, field))
        total = self.total_training_steps
        require(total >= 0, "trainer.total_training_steps", total, "must not be negative")
        for field in ("test_freq", "save_freq"):
            value = getattr(self, field)
            require(value >= -1, f"trainer.{field}", value, "must be -1 (never), 0 (after the last step) or greater")
        require_choice("trainer.resume_mode", self.resume_mode, ["auto", "disable", "path"])
        require(
            (self.resume_mode == "path") == (self.resume_from_path is not None),
            "trainer.resume_from_path",
            self.resume_from_path,
            "needs trainer.resume_mode=path and vice versa; set both or neither",
        )
        keep = self.max_ckpt_to_keep
        require(keep >= 0, "trainer.max_ckpt_to_keep", keep, "must not be negative")
        positive = all(step > 0 for step in self.profile_steps)
        require(positive, "trainer.profile_steps", self.profile_steps, "steps are counted from 1")
        require(self.peak_tflops >= 0, "trainer.peak_tflops", self.peak_tflops, "must not be negative")

    @property
    def world_size(self) -> int:
        """Number of workers."""
        return self.nnodes * self.n_gpus_per_node

    def saves_nothing(self, total_steps: int) -> bool:
        """Whether a run of ``total_steps`` ends without a checkpoint."""
        return self.save_freq == -1

    def num_steps(self, steps_per_epoch: int) -> int:
        """Steps of the whole run: ``total_epochs`` passes, or ``total_training_steps`` if that is set and fewer."""
        by_epochs = self.total_epochs * steps_per_epoch
        return min(self.total_training_steps, by_epochs) if self.total_training_steps else by_epochs


def require_seed(seed: int) -> None:
    """Raise ``ConfigError`` for a seed that a random generator would refuse."""
    require(0 <= seed < 2**32, "seed", seed, "must be from 0 to 4294967295")


def check_workers(model: ModelConfig, prefix: str, workers: int) -> None:
    """Raise ``ConfigError`` naming ``prefix.<field>`` where a model cannot be spread over so many workers."""
    world = "trainer.nnodes*trainer.n_gpus_per_node"
    sequence, size = model.ulysses_sequence_parallel_size, model.fsdp.fsdp_size
    check_divides(f"{prefix}.ulysses_sequence_parallel_size", sequence, world, workers)
    check_divides(f"{prefix}.fsdp.fsdp_size", workers if size == -1 else size, world, workers)


def check_divisible(field: str, value: int, divisor_name: str, divisor: int) -> None:
    """Raise ``ConfigError`` naming both fields unless ``divisor`` divides ``value``."""
    nearest = max(divisor, round(value / divisor) * divisor)
    require(
        value % divisor == 0,
        field,
        value,
        f"must be divisible by {divisor_name}={divisor}; the nearest value that is: {nearest}",
    )


def check_divides(field: str, value: int, dividend_name: str, dividend: int) -> None:
    """Raise ``ConfigError`` naming both fields unless ``value`` divides ``dividend``."""
    divisors = [size for size in range(1, dividend + 1) if dividend % size == 0]
    require(value in divisors, field, value, f"must divide {dividend_name}={dividend}; set one of {divisors}")
