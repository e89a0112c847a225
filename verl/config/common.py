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


def check_loggers(loggers: list[str]) -> None:
    """Raise ``ValueError`` for a tracking backend that does not exist."""
    for name in loggers:
        require_choice("trainer.logger", name, LOGGERS)


def check_divisible(field: str, value: int, divisor_name: str, divisor: int) -> None:
    """Raise ``ValueError`` naming both fields unless ``divisor`` divides ``value``."""
    nearest = max(divisor, round(value / divisor) * divisor)
    require(
        value % divisor == 0,
        field,
        value,
        f"must be divisible by {divisor_name}={divisor}; the nearest value that is: {nearest}",
    )
