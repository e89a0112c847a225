"""Configuration that reinforcement learning and supervised fine-tuning share."""

import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal

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
    Step,
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
# vLLM would change a temperature in between, and engines would overflow above.
_GREEDY_OR = "must be at least 0: 0 for greedy decoding, or from 0.01, the least that vLLM takes, to 1000"
Temperature = Annotated[float, rule(lambda value: value == 0 or 0.01 <= value <= 1000, _GREEDY_OR)]
RepetitionPenalty = Annotated[
    float, rule(lambda value: 0.01 <= value <= 100, "must be greater than 0, from 0.01 to 100")
]

ALL_LINEAR = "all-linear"
"""Stands for every linear layer in ``lora.target_modules``."""
PACKED_ATTENTION = ["sdpa", "eager", "flash_attention_2", "flash_attention_3"]
"""Attention kernels that know where a row of a packed sequence ends."""


@dataclass(frozen=True)
class LoraConfig(Group):
    """Low-rank adapters (arXiv 2106.09685) that are trained instead of the model."""

    rank: Annotated[int, within("[0, 65536]")]
    """Rank of the adapters; 0 trains the whole model, without adapters."""
    alpha: PositiveFloat
    """An adapter's product is scaled by ``alpha / rank``."""
    target_modules: Annotated[list[str], NAMES_ONE]
    """Names of the linear layers that get an adapter, such as ``q_proj``; ``all-linear`` is all but the output head."""
    dropout: Annotated[float, within("[0, 1)")]
    """Share of an adapter's inputs that each update drops, in [0, 1); other passes drop none. In reinforcement learning
    the probability ratio then differs from 1 before the first step: leave it at 0 unless adapters overfit."""

    def check(self) -> None:
        alone = ALL_LINEAR not in self.target_modules or len(self.target_modules) == 1
        self.require(alone, "target_modules", f"{ALL_LINEAR} covers all layers; leave out the others")


@dataclass(frozen=True)
class FSDPConfig(Group):
    """How a model's weights and optimizer are sharded over workers and offloaded to host memory."""

    fsdp_size: Annotated[int, rule(lambda size: size == -1 or size > 0, "must be null, -1 or at least 1")] | None
    """Workers, consecutive in rank, that share one copy of the model (hybrid sharding). Must divide the number of
    workers; -1: all workers share one copy. Null: each worker has its own copy of a model of at most 50 million
    parameters, which takes longer to gather than to compute with; all share one of a larger model."""
    param_offload: bool
    """Keep parameters in pinned host memory between the phases that use them. Saves nothing on a CPU."""
    optimizer_offload: bool
    """Keep the optimizer's state in host memory except during its step. Saves nothing on a CPU."""

    def workers_per_copy(self, workers: int) -> int:
        """Return the workers, of ``workers``, that share one copy of a model that is not small."""
        return workers if self.fsdp_size in (None, -1) else self.fsdp_size


@dataclass(frozen=True)
class ModelConfig(Group):
    """A model and how it is held during training."""

    path: Annotated[str, rule(bool, "name a model folder or a hub id")]
    """A Hugging Face model: a local folder or a hub id."""
    override_config: dict[str, Any]
    """Values that replace those in ``config.json``, such as ``rope_scaling`` or ``max_position_embeddings``; a
    mapping replaces the file's as a whole. They hold for training, rollouts, checks and what is exported."""
    param_dtype: Literal["float32", "bfloat16"]
    """Precision of matrix products, forward and backward: ``float32`` or ``bfloat16``; master weights stay float32."""
    logits_dtype: Literal["auto", "float32"]
    """Precision of the output head's product: ``auto`` is ``param_dtype``; ``float32`` takes a copy of the head's
    weights in float32. The softmax over the logits is always computed in float32."""
    attn_implementation: str
    """Attention kernel by its ``transformers`` name: ``sdpa``, ``eager``, ``flash_attention_2``, ..."""
    trust_remote_code: bool
    """Allow code inside the model folder to run."""
    gradient_checkpointing: bool
    """Keep one activation per decoder layer and recompute the others in the backward pass: less memory, about a third
    more time. Does not change the gradient."""
    use_remove_padding: bool
    """Pack the rows of a micro-batch into one sequence without padding. Does not change the results."""
    share_prompts: bool
    """Read each different prompt of a micro-batch once for all its responses in it. Does not change the results. Where
    rows are packed (``use_remove_padding``) and not split among workers, by the policy and the reference; a critic and
    a reward model read whole rows."""
    use_liger: bool
    """Use the Liger kernels (norms, rotary embedding, gated linear units); needs a GPU and ``liger-kernel``."""
    ulysses_sequence_parallel_size: PositiveInt
    """Workers, consecutive in rank, that split each sequence among them (DeepSpeed-Ulysses, arXiv 2309.14509). Must
    divide the number of workers and of attention heads; above 1 it needs ``use_remove_padding``."""
    logits_chunk_size: NotNegativeInt
    """Tokens per worker whose logits are in memory at the same time; log-probabilities and entropies are computed chunk
    by chunk. 0: all tokens of a micro-batch."""
    lora: LoraConfig
    lora_adapter_path: str | None
    """Folder of a LoRA adapter that ``peft`` saved (safetensors), to train further; null: none. Its rank, scale and
    layers replace ``lora``. The reference policy is the model without it. For the policy alone."""
    fsdp: FSDPConfig

    @property
    def shares_prompts(self) -> bool:
        """Whether prompts are read once for several rows."""
        return self.share_prompts and self.use_remove_padding and self.ulysses_sequence_parallel_size == 1

    @property
    def trains_adapters(self) -> bool:
        """Whether adapters are trained instead of the model."""
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
    """Peak learning rate, in (0, 1]."""
    betas: Annotated[list[float], rule(_are_betas, "needs two numbers in [0, 1), such as [0.9,0.999]")]
    """AdamW's two decay rates, each in [0, 1)."""
    eps: Annotated[float, rule(lambda eps: eps >= 1e-38, "must be greater than 0 (1e-38, in float32)")]
    """AdamW's term in the denominator, above 0; float32."""
    weight_decay: float
    """Decoupled weight decay, at least 0."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"]
    """``constant``, ``linear`` or ``cosine`` decay (half a wave) after the warm-up, until the last optimizer step."""
    lr_warmup_steps: Annotated[int, rule(lambda n: n >= -1, "must be at least 0, or -1 for lr_warmup_steps_ratio")]
    """Optimizer steps of linear warm-up: the rate is lr / (n + 1), 2 lr / (n + 1), ... and ``lr`` after n of them; -1:
    ``lr_warmup_steps_ratio`` decides. veRL counts training steps here, and starts from a rate of 0."""
    lr_warmup_steps_ratio: Probability
    """Share of the run's optimizer steps that are warm-up, in [0, 1], rounded down; with ``lr_warmup_steps=-1``."""
    min_lr_ratio: Probability
    """The decay ends at ``lr * min_lr_ratio``."""
    grad_clip: PositiveFloat
    """Largest global gradient norm; larger gradients are scaled down to this norm."""
    max_skipped_updates: NotNegativeInt
    """Optimizer steps in a row that may be skipped because their gradient is not finite; they are counted in
    ``skipped_updates``, and one more ends the run. 0: the first ends it."""

    def check(self) -> None:
        fix = f"must be at least 0, and times optim.lr={self.lr:g} below 1, else it turns the sign of every weight"
        self.require(0 <= self.weight_decay and self.weight_decay * self.lr < 1, "weight_decay", fix)
        steps = self.lr_warmup_steps
        unused = f"lr_warmup_steps={steps} comes first; set lr_warmup_steps=-1 too, or this to 0"
        self.require(self.lr_warmup_steps_ratio == 0 or steps == -1, "lr_warmup_steps_ratio", unused)

    def warmup_steps(self, total_steps: int) -> int:
        """Optimizer steps of warm-up in a run of ``total_steps``."""
        return int(self.lr_warmup_steps_ratio * total_steps) if self.lr_warmup_steps < 0 else self.lr_warmup_steps


_VARIABLE = re.compile(r"[A-Za-z_*][\w*]*")


@dataclass(frozen=True)
class MachineOptions(Group):
    """The machines of a run (docs/multinode.md), and where it is logged."""

    project_name: FolderName
    """Name of the project in trackers; letters, digits and ``. _ + -``."""
    logger: list[Logger]
    """Trackers in addition to ``metrics.jsonl`` (docs/metrics.md#trackers): ``console``,
    ``tensorboard``, ``wandb``; ``mlflow`` and ``swanlab``, whose packages you install; ``file``, which writes the file
    that ``VERL_FILE_LOGGER_PATH`` names as well. Missing packages and keys are found before anything starts."""
    nnodes: Machines
    """Machines of the Ray cluster to use."""
    machines_timeout_s: Seconds
    """Seconds to wait until an existing cluster has ``nnodes`` machines, above 0; then the run ends and names those
    that are missing. After a failure, a run waits as long again, and then once more for ``min_nnodes`` of them."""
    object_store_mb: Annotated[int, rule(lambda mb: mb == 0 or mb >= 75, "Ray needs at least 75; 0 sizes it itself")]
    """Shared memory for messages between driver and workers, MiB per machine, at least 75. 0: two training or
    validation batches of the longest prompts and responses, and for engines of their own two copies of the weights, at
    least 256 and at most four fifths of /dev/shm. Existing clusters have their own (``ray start``)."""
    env: list[str]
    """Environment variables that workers on all machines get, in addition to NCCL_*, GLOO_*, UCX_*, HF_*, TORCH_*,
    CUDA_*, PYTORCH_*, VLLM_* and OMP_*; ``*`` stands for any characters. Their values come from the environment of the
    command and are never written down."""

    def check(self) -> None:
        fix = "names variables only, such as MY_CACHE or MY_*; set their values in the environment"
        for name in self.env:  # of which a value would be written into config.yaml
            require(_VARIABLE.fullmatch(name) is not None, "env", name.partition("=")[0], fix)


@dataclass(frozen=True)
class RunConfig(MachineOptions):
    """Length of a run, its workers, and its outputs."""

    experiment_name: FolderName
    """Name of the run in trackers; letters, digits and ``. _ + -``."""
    default_local_dir: str
    """Folder for everything that the run writes. If it holds an unfinished run, ``resume_mode`` decides."""
    n_gpus_per_node: WorkersPerMachine
    """Workers per machine: one per GPU, or this many CPU processes."""
    total_epochs: PositiveInt
    """Passes over the training data. An incomplete last batch is left out."""
    total_training_steps: NotNegativeInt
    """Stop after this many steps, if ``total_epochs`` has more; 0: no limit. Learning rates decay until then."""
    test_freq: Frequency
    """Validate every so many steps and after the last; 0: only after the last; -1: never."""
    save_freq: Frequency
    """Save a checkpoint every so many steps and after the last; 0: only after the last; -1: never."""
    report_freq: Frequency
    """Write ``report.html``, the page of the run (docs/report.md), into its folder every so many steps and at its end;
    0: only at its end; -1: never. A process of its own makes it, and no step waits for it."""
    resume_mode: Literal["auto", "disable", "path"]
    """``auto``: resume from the latest complete checkpoint in ``default_local_dir``, or start where there is none;
    ``disable``: the folder must be new or empty; ``path``: resume from ``resume_from_path``, or
    from a later checkpoint that the same command has written since."""
    resume_from_path: str | None
    """Folder of a checkpoint, ``.../global_step_N``, of this run or another; used with ``resume_mode=path``."""
    max_ckpt_to_keep: NotNegativeInt
    """Keep this many of the newest checkpoints, and the best one; older ones are removed once a new one is complete.
    0: keep all."""
    save_hf_model: bool
    """Also write the model as ``transformers`` and vLLM load it into each checkpoint, as ``actor/huggingface``. If
    false, ``python -m verl.trainer.main_export`` can write it later."""
    async_save: bool | None
    """Copy a checkpoint to the host's memory and write it to disk while training continues. ``null``: on GPUs."""
    max_restarts: NotNegativeInt
    """How often the run starts again from its latest checkpoint after a worker, a machine or the network failed or
    hung. Errors of the program, and one that comes twice in a row in the same step and worker, always end it."""
    min_nnodes: int | None
    """Fewest machines to continue with if not all of ``nnodes`` return after a failure; null: ``nnodes``."""
    # Below, a busy machine would count as lost at every start, and a job be requeued for ever.
    detection_s: Annotated[float, within("[1, 86400]")]
    """Seconds of silence, from 1 to 86400, after which a machine or worker counts as lost, and after which workers that
    lost the driver exit. Ray's own time is set by its environment variables (docs/multinode.md)."""
    phase_timeout_s: SecondsOrZero
    """Most seconds for one call of the workers: generating a step's responses, one optimizer step, saving, starting.
    After that every worker's Python stacks are written to ``logs/`` and the attempt ends; 0: no limit."""
    nccl_timeout_s: Seconds
    """Time limit in seconds of collective operations; longer than worker 0 takes to read the model."""
    preemption_grace_s: SecondsOrZero
    """After SIGTERM or SIGUSR1 the step is finished and saved, and the run exits with code 75. If that takes longer
    than this many seconds, the step is abandoned and the latest checkpoint counts; 0: no limit."""
    profile_steps: list[Step]
    """Steps of which each worker writes a torch profiler trace to ``profile/``."""
    peak_tflops: NotNegativeFloat
    """Peak speed of one device in 10^12 operations a second at ``param_dtype``, for the model FLOPs utilisation; 0:
    looked up by the GPU's name, and nothing is logged for an unknown device."""

    def saves_in_background(self, device_type: str) -> bool:
        """Whether training continues while a checkpoint is written."""
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
        """``nnodes``, ``n_gpus_per_node`` and ``machines_timeout_s``."""
        return self.nnodes, self.n_gpus_per_node, self.machines_timeout_s

    @property
    def world_size(self) -> int:
        """Number of workers."""
        return self.nnodes * self.n_gpus_per_node

    @property
    def world_sizes(self) -> list[int]:
        """Numbers of workers that the run may continue with, ``min_nnodes`` included."""
        fewest = self.nnodes if self.min_nnodes is None else self.min_nnodes
        return [nodes * self.n_gpus_per_node for nodes in range(self.nnodes, fewest - 1, -1)]

    def saves_nothing(self, total_steps: int) -> bool:
        """Whether a run of ``total_steps`` ends without a checkpoint."""
        return self.save_freq == -1

    def num_steps(self, steps_per_epoch: int) -> int:
        """Return the steps of the run: ``total_epochs`` passes, or ``total_training_steps`` if set and smaller."""
        by_epochs = self.total_epochs * steps_per_epoch
        return min(self.total_training_steps, by_epochs) if self.total_training_steps else by_epochs

    def length_note(self, steps_per_epoch: int) -> str:
        """Return a line with the option that ends the run, and when."""
        by_epochs, limit = self.total_epochs * steps_per_epoch, self.total_training_steps
        note = f"trainer.total_epochs={self.total_epochs} ({by_epochs} steps, {steps_per_epoch} each)"
        if limit > by_epochs:
            note += f" before trainer.total_training_steps={limit}"
        elif 0 < limit < by_epochs:
            note = f"trainer.total_training_steps={limit} comes before {note}"
        return f"the run ends after {self.num_steps(steps_per_epoch)} steps: {note}"


def check_workers(model: ModelConfig, prefix: str, workers: int) -> None:
    """Raise ``ConfigError`` naming ``prefix.<field>`` if a model cannot be split over this many workers."""
    world = "trainer.nnodes*trainer.n_gpus_per_node"
    sequence, size = model.ulysses_sequence_parallel_size, model.fsdp.workers_per_copy(workers)
    check_divides(f"{prefix}.ulysses_sequence_parallel_size", sequence, world, workers)
    check_divides(f"{prefix}.fsdp.fsdp_size", size, world, workers)


def check_divides(field: str, value: int, dividend_name: str, dividend: int) -> None:
    """Raise ``ConfigError`` naming both fields unless ``value`` divides ``dividend``."""
    if value > 0 and dividend % value == 0:
        return
    divisors = [size for size in range(1, min(dividend, 1024) + 1) if dividend % size == 0]
    require(False, field, value, f"must divide {dividend_name}={dividend}; set one of {divisors}")
