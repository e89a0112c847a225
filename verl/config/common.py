"""Options shared by reinforcement learning and supervised fine-tuning."""

import re
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, Self

from verl.config.checks import (
    NAMES_ONE,
    FolderName,
    Group,
    NotNegativeFloat,
    NotNegativeInt,
    PositiveFloat,
    PositiveInt,
    Probability,
    Seconds,
    SecondsOrZero,
    Share,
    StepNumber,
    require,
    require_choice,
    rule,
    within,
)

Device = Literal["auto", "cpu", "cuda"]
Logger = Literal["console", "tensorboard", "wandb", "mlflow", "swanlab", "file"]

Seed = Annotated[int, within("[0, 4294967295]")]
Machines = Annotated[int, rule(lambda nodes: 0 < nodes <= 100_000, "must be greater than 0 and at most 100000")]
WorkersPerMachine = Annotated[int, rule(lambda size: 0 < size <= 1024, "must be greater than 0 and at most 1024")]
Frequency = Annotated[int, rule(lambda freq: freq >= -1, "must be -1 (never), 0 (only at the end) or greater")]
# vLLM raises temperatures between 0 and 0.01, and engines overflow above 1000.
_GREEDY_OR = "must be at least 0: 0 for greedy decoding, or from 0.01, the least that vLLM takes, to 1000"
Temperature = Annotated[float, rule(lambda value: value == 0 or 0.01 <= value <= 1000, _GREEDY_OR)]
RepetitionPenalty = Annotated[
    float, rule(lambda value: 0.01 <= value <= 100, "must be greater than 0, from 0.01 to 100")
]

ALL_LINEAR = "all-linear"
"""Value of ``lora.target_modules`` that selects all linear layers except the output head."""
PACKED_ATTENTION = ["sdpa", "eager", "flash_attention_2", "flash_attention_3"]
"""Attention implementations that support packed sequences."""


@dataclass(frozen=True)
class LoraConfig(Group):
    """Low-rank adapters (arXiv 2106.09685), which are trained while the model's weights stay frozen."""

    rank: Annotated[int, within("[0, 65536]")]
    """Rank of the adapters; 0 trains the whole model, without adapters."""
    alpha: PositiveFloat
    """Scale of the adapters: their output is multiplied by ``alpha / rank``."""
    target_modules: Annotated[list[str], NAMES_ONE]
    """Names of the linear layers to adapt, such as ``q_proj``; ``all-linear`` selects all except the output head."""
    dropout: Annotated[float, within("[0, 1)")]
    """Dropout probability of the adapters' inputs during updates, in [0, 1); other passes use no dropout. In RL,
    dropout moves the probability ratio away from 1 before the first step; use 0 unless adapters overfit."""

    def check(self) -> None:
        alone = ALL_LINEAR not in self.target_modules or len(self.target_modules) == 1
        self.require(alone, "target_modules", f"{ALL_LINEAR} covers all layers; leave out the others")


@dataclass(frozen=True)
class FSDPConfig(Group):
    """Options for sharding model weights and optimizer state across workers and offloading them to host memory."""

    fsdp_size: Annotated[int, rule(lambda size: size == -1 or size > 0, "must be null, -1 or at least 1")] | None
    """Number of consecutive ranks that share one copy of the model (hybrid sharding); must divide the number of
    workers. -1 shards one copy across all workers. Null also means -1, but does not shard models of up to 50 million
    parameters, because gathering their weights would take longer than the computation."""
    param_offload: bool
    """Keep parameters in pinned host memory while they are not in use. Offloading saves no memory on a CPU."""
    optimizer_offload: bool
    """Keep the optimizer state in host memory except during the optimizer step. Offloading saves no memory on a CPU."""

    def workers_per_copy(self, workers: int) -> int:
        """Return the number of workers that share one copy of a large model in a run with ``workers`` workers."""
        return workers if self.fsdp_size in (None, -1) else self.fsdp_size


@dataclass(frozen=True)
class ModelConfig(Group):
    """A model and its precision, memory and parallelism settings during training."""

    path: Annotated[str, rule(bool, "name a model folder or a hub id")]
    """Folder or hub id of a Hugging Face model, or the folder of a run or checkpoint with an exported model."""
    override_config: dict[str, Any]
    """Overrides for ``config.json``, such as ``rope_scaling`` or ``max_position_embeddings``, which apply to training,
    rollouts, checks and exported models. A nested mapping replaces the original one instead of being merged into it."""
    param_dtype: Literal["float32", "bfloat16"]
    """Precision of matrix products in forward and backward passes; master weights stay float32."""
    logits_dtype: Literal["auto", "float32"]
    """Precision of the output head's matrix product. ``auto`` uses ``param_dtype``; ``float32`` keeps a float32 copy of
    the head's weights. The softmax over the logits is always computed in float32."""
    attn_implementation: str
    """Name of the attention kernel in ``transformers``: ``sdpa``, ``eager``, ``flash_attention_2``, ..."""
    trust_remote_code: bool
    """Allow running code from the model folder."""
    gradient_checkpointing: bool
    """Keep one activation per decoder layer and recompute all others in the backward pass. Checkpointing saves memory,
    takes about a third more time, and does not change the gradient."""
    use_remove_padding: bool
    """Concatenate the sequences of a micro-batch without padding. Packing does not change the results."""
    share_prompts: bool
    """Process each distinct prompt in a micro-batch only once for all of its responses. Sharing does not change the
    results. Only the policy and the reference policy share prompts, which requires ``use_remove_padding`` and no
    sequence parallelism. The critic and the reward model always process full sequences."""
    use_liger: bool
    """Use the Liger kernels (norms, rotary embedding, gated linear units); needs a GPU and ``liger-kernel``."""
    ulysses_sequence_parallel_size: PositiveInt
    """Number of consecutive ranks that split each sequence (DeepSpeed-Ulysses, arXiv 2309.14509). The number of ranks
    must divide the numbers of workers and attention heads. Values above 1 need ``use_remove_padding``."""
    logits_chunk_size: NotNegativeInt
    """Number of tokens whose logits each worker keeps in memory at once; log-probabilities and entropies are computed
    in chunks of this size. 0 processes all tokens of a micro-batch at once."""
    lora: LoraConfig
    lora_adapter_path: str | None
    """Folder of a LoRA adapter, saved by ``peft`` as safetensors, from which to continue training, or null. The
    adapter's rank, scale and layers override ``lora``. The reference policy is the model without the adapter."""
    fsdp: FSDPConfig

    @property
    def shares_prompts(self) -> bool:
        """Whether each distinct prompt is processed only once."""
        return self.share_prompts and self.use_remove_padding and self.ulysses_sequence_parallel_size == 1

    @property
    def trains_adapters(self) -> bool:
        """Whether LoRA adapters are trained instead of the full model."""
        return self.lora.rank > 0 or self.lora_adapter_path is not None

    def check(self) -> None:
        self.require(
            self.ulysses_sequence_parallel_size == 1 or self.use_remove_padding,
            "ulysses_sequence_parallel_size",
            "only packed sequences can be split; set model.use_remove_padding=true",
        )
        self.require("attn_implementation" not in self.override_config, "override_config", "set attn_implementation")
        if self.use_remove_padding:
            require_choice("attn_implementation", self.attn_implementation, PACKED_ATTENTION)


def _are_betas(betas: list[float]) -> bool:
    return len(betas) == 2 and all(0 <= beta < 1 for beta in betas)


@dataclass(frozen=True)
class OptimConfig(Group):
    """AdamW and its learning-rate schedule."""

    lr: Share
    """Peak learning rate in (0, 1]."""
    betas: Annotated[list[float], rule(_are_betas, "needs two numbers in [0, 1), such as [0.9,0.999]")]
    """Decay rates of AdamW's two moment estimates, each in [0, 1)."""
    eps: Annotated[float, rule(lambda eps: eps >= 1e-38, "must be greater than 0 (1e-38, in float32)")]
    """AdamW's epsilon, which is added to the denominator in float32 and must be above 0."""
    weight_decay: float
    """Decoupled weight decay, at least 0."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"]
    """Learning rate schedule after warm-up. ``linear`` and ``cosine`` (half a period) decay until the last step."""
    lr_warmup_steps: Annotated[int, rule(lambda n: n >= -1, "must be at least 0, or -1 for lr_warmup_steps_ratio")]
    """Number n of linear warm-up steps: the learning rate is lr / (n + 1), 2 lr / (n + 1), ..., and ``lr`` after n
    optimizer steps. -1 uses ``lr_warmup_steps_ratio``. veRL instead counts training steps and starts at a rate of 0."""
    lr_warmup_steps_ratio: Probability
    """Fraction of the run's optimizer steps used for warm-up, in [0, 1], rounded down; needs ``lr_warmup_steps=-1``."""
    min_lr_ratio: Probability
    """Learning rate at the end of the decay, as a fraction of ``lr``."""
    grad_clip: PositiveFloat
    """Maximum global gradient norm; gradients with a larger norm are scaled down."""
    max_skipped_updates: NotNegativeInt
    """Maximum number of consecutive optimizer steps to skip because of non-finite gradients before the run ends. The
    metric ``skipped_updates`` counts skipped steps. With 0, the first non-finite gradient ends the run."""

    def check(self) -> None:
        fix = f"must be at least 0, and times optim.lr={self.lr:g} below 1, else it turns the sign of every weight"
        self.require(0 <= self.weight_decay and self.weight_decay * self.lr < 1, "weight_decay", fix)
        steps = self.lr_warmup_steps
        unused = f"lr_warmup_steps={steps} comes first; set lr_warmup_steps=-1 too, or this to 0"
        self.require(self.lr_warmup_steps_ratio == 0 or steps == -1, "lr_warmup_steps_ratio", unused)

    def cut_to(self, total_steps: int) -> Self:
        """Return these options with the warm-up limited to the length of the run."""
        return replace(self, lr_warmup_steps=min(self.lr_warmup_steps, total_steps))

    def warmup_steps(self, total_steps: int) -> int:
        """Return the number of warm-up steps in a run of ``total_steps`` optimizer steps."""
        return int(self.lr_warmup_steps_ratio * total_steps) if self.lr_warmup_steps < 0 else self.lr_warmup_steps


_VARIABLE = re.compile(r"[A-Za-z_*][\w*]*")


@dataclass(frozen=True)
class MachineOptions(Group):
    """Options for a run's machines (docs/multinode.md) and trackers."""

    project_name: FolderName
    """Project name in trackers, made of letters, digits and ``. _ + -``."""
    logger: list[Logger]
    """Trackers in addition to ``metrics.jsonl`` (docs/metrics.md#trackers): ``console``, ``tensorboard``, ``wandb``,
    ``mlflow``, ``swanlab`` or ``file``. ``mlflow`` and ``swanlab`` must be installed separately; ``file`` writes to the
    path in ``VERL_FILE_LOGGER_PATH``. Missing packages and API keys are reported before the run starts."""
    nnodes: Machines
    """Number of machines in the Ray cluster to use."""
    machines_timeout_s: Seconds
    """Seconds to wait for ``nnodes`` machines to join an existing cluster before the run lists the missing ones and
    fails. After a failure, the run waits this long for ``nnodes`` machines, then as long for ``min_nnodes``."""
    object_store_mb: Annotated[int, rule(lambda mb: mb == 0 or mb >= 75, "Ray needs at least 75; 0 sizes it itself")]
    """Shared memory per machine in MiB for messages between driver and workers, at least 75. 0 reserves room for two
    training or validation batches of maximum length, and two copies of the weights if engines are separate, but at
    least 256 MiB and at most four fifths of /dev/shm. Existing clusters keep the size set with ``ray start``."""
    env: list[str]
    """Names of additional environment variables to pass to all workers, with ``*`` as a wildcard. NCCL_*, GLOO_*,
    UCX_*, HF_*, TORCH_*, CUDA_*, PYTORCH_*, VLLM_* and OMP_* are always passed. Values are read from the environment of
    the launching process and never written to disk."""

    def check(self) -> None:
        fix = "names variables only, such as MY_CACHE or MY_*; set their values in the environment"
        for name in self.env:  # values would be written to config.yaml
            require(_VARIABLE.fullmatch(name) is not None, "env", name.partition("=")[0], fix)


@dataclass(frozen=True)
class RunConfig(MachineOptions):
    """Options for a run's length, workers and outputs."""

    experiment_name: FolderName
    """Name of the run in trackers, made of letters, digits and ``. _ + -``."""
    default_local_dir: str
    """Folder for all output of the run. ``resume_mode`` determines whether a run in this folder is resumed."""
    n_gpus_per_node: WorkersPerMachine
    """Number of workers per machine; each worker uses one GPU, or the CPU if there are no GPUs."""
    total_epochs: PositiveInt
    """Number of passes over the training data. An incomplete last batch is dropped."""
    total_training_steps: NotNegativeInt
    """Maximum number of steps, or 0 for all steps of ``total_epochs``. Learning rates decay until the last step."""
    test_freq: Frequency
    """Validate every N steps and after the last step; 0 validates only after the last step, -1 never."""
    save_freq: Frequency
    """Save a checkpoint every N steps and after the last step; 0 saves only after the last step, -1 never."""
    report_freq: Frequency
    """Write the run's report, ``report.html`` (docs/report.md), every N steps and at the end of the run; 0 writes it
    only at the end, -1 never. A separate process writes the report, so training is not delayed."""
    resume_mode: Literal["auto", "disable", "path"]
    """``auto`` resumes from the latest complete checkpoint in ``default_local_dir``, if there is one. ``disable``
    requires a new or empty folder. ``path`` resumes from ``resume_from_path``, or from a later checkpoint that an
    earlier run of the same command has written."""
    resume_from_path: str | None
    """Checkpoint folder, ``.../global_step_N``, of this or another run; used with ``resume_mode=path``."""
    resume_changed: Literal["refuse", "warn"]
    """Handling of changes to the training data, tokenizer, verifiers, reward functions, environments or tools since
    the checkpoint was written. ``refuse`` ends the run and lists the changes; ``warn`` continues."""
    max_ckpt_to_keep: NotNegativeInt
    """Number of recent checkpoints to keep in addition to the best checkpoint. Older checkpoints are removed once a new
    checkpoint is complete. 0 keeps all checkpoints."""
    save_hf_model: bool
    """Also write the model to ``actor/huggingface`` in each checkpoint, in the format that ``transformers`` and vLLM
    load. If false, ``python -m verl.trainer.main_export`` can export the model later."""
    async_save: bool | None
    """Copy checkpoints to host memory and write them to disk while training continues. Null means true on GPUs."""
    max_restarts: NotNegativeInt
    """Maximum number of restarts from the latest checkpoint after a worker, a machine or the network fails or hangs.
    Program errors always end the run, as do errors that occur twice in a row in the same step and worker."""
    min_nnodes: int | None
    """Minimum number of machines required to continue after a failure, or null for ``nnodes``."""
    # With shorter times, a busy machine would count as lost at every start, and a job would be requeued forever.
    detection_s: Annotated[float, within("[1, 86400]")]
    """Seconds without a heartbeat, from 1 to 86400, after which a machine or worker is considered lost. Workers exit if
    they cannot reach the driver for this long. Ray has a separate timeout, which is set with environment variables (see
    docs/multinode.md)."""
    phase_timeout_s: SecondsOrZero
    """Time limit in seconds for one call to the workers: startup, generation of a step's responses, an optimizer step,
    or a save. On timeout, all workers write their Python stacks to ``logs/`` and the attempt ends. 0 means no limit."""
    nccl_timeout_s: Seconds
    """Timeout in seconds for collective operations; must exceed the time that worker 0 needs to load the model."""
    preemption_grace_s: SecondsOrZero
    """Time limit in seconds to finish and save the current step after SIGTERM or SIGUSR1, before the run exits with
    code 75. A step that takes longer is discarded, and the latest checkpoint is kept. 0 means no limit."""
    profile_steps: list[StepNumber]
    """Training steps to profile; each worker writes a torch profiler trace to ``profile/``."""
    peak_tflops: NotNegativeFloat
    """Peak throughput of one device in TFLOP/s at ``param_dtype``, used to compute the model FLOPs utilisation. 0 looks
    up the throughput by the GPU's name; no utilisation is logged for unknown GPUs."""

    def saves_in_background(self, device_type: str) -> bool:
        """Return whether training continues while a checkpoint is written."""
        return device_type == "cuda" if self.async_save is None else self.async_save

    def check(self) -> None:
        from_path = self.resume_mode == "path"
        self.require(
            from_path == (self.resume_from_path is not None),
            "resume_from_path",
            "trainer.resume_mode=path needs a checkpoint; name its folder, .../global_step_N"
            if from_path
            else "is used only with trainer.resume_mode=path; set that too, or leave this out",
        )
        limit = f"must be from 1 to trainer.nnodes={self.nnodes}, or null"
        self.require(self.min_nnodes is None or 1 <= self.min_nnodes <= self.nnodes, "min_nnodes", limit)

    @property
    def place(self) -> tuple[int, int, float]:
        """Values of ``nnodes``, ``n_gpus_per_node`` and ``machines_timeout_s``."""
        return self.nnodes, self.n_gpus_per_node, self.machines_timeout_s

    @property
    def world_size(self) -> int:
        """Number of workers."""
        return self.nnodes * self.n_gpus_per_node

    @property
    def world_sizes(self) -> list[int]:
        """Numbers of workers with which the run can continue, from ``nnodes`` down to ``min_nnodes`` machines."""
        fewest = self.nnodes if self.min_nnodes is None else self.min_nnodes
        return [nodes * self.n_gpus_per_node for nodes in range(self.nnodes, fewest - 1, -1)]

    def saves_nothing(self, total_steps: int) -> bool:
        """Return whether a run of ``total_steps`` steps ends without saving a checkpoint."""
        return self.save_freq == -1

    def num_steps(self, steps_per_epoch: int) -> int:
        """Return the number of steps in ``total_epochs`` epochs, limited to ``total_training_steps`` if it is set."""
        by_epochs = self.total_epochs * steps_per_epoch
        return min(self.total_training_steps, by_epochs) if self.total_training_steps else by_epochs

    def length_note(self, steps_per_epoch: int) -> str:
        """Return a one-line note on which option determines the last step of the run."""
        by_epochs, limit = self.total_epochs * steps_per_epoch, self.total_training_steps
        note = f"trainer.total_epochs={self.total_epochs} ({by_epochs} steps, {steps_per_epoch} each)"
        if limit > by_epochs:
            note += f" before trainer.total_training_steps={limit}"
        elif 0 < limit < by_epochs:
            note = f"trainer.total_training_steps={limit} comes before {note}"
        return f"the run ends after {self.num_steps(steps_per_epoch)} steps: {note}"


def check_workers(model: ModelConfig, prefix: str, workers: int) -> None:
    """Raise a ``ConfigError`` that names ``prefix.<field>`` if a model cannot be split across ``workers`` workers."""
    world = "trainer.nnodes*trainer.n_gpus_per_node"
    sequence, size = model.ulysses_sequence_parallel_size, model.fsdp.workers_per_copy(workers)
    check_divides(f"{prefix}.ulysses_sequence_parallel_size", sequence, world, workers)
    check_divides(f"{prefix}.fsdp.fsdp_size", size, world, workers)


def check_divides(field: str, value: int, dividend_name: str, dividend: int) -> None:
    """Raise a ``ConfigError`` that names both fields unless ``value`` divides ``dividend``."""
    if value > 0 and dividend % value == 0:
        return
    divisors = [size for size in range(1, min(dividend, 1024) + 1) if dividend % size == 0]
    require(False, field, value, f"must divide {dividend_name}={dividend}; set one of {divisors}")
