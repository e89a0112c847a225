"""Models sharded by FSDP2 and their optimizer."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR
from transformers import (
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    PreTrainedModel,
)

from verl.config.common import ModelConfig, OptimConfig


def load_sharded_model(config: ModelConfig, mesh: DeviceMesh, trainable: bool) -> PreTrainedModel:
    """Load a causal language model in float32 and shard its parameters over ``mesh``. Every rank reads it whole."""
    return _shard(AutoModelForCausalLM.from_pretrained(config.path, **_load_options(config)), config, mesh, trainable)


def load_sharded_value_model(config: ModelConfig, mesh: DeviceMesh, trainable: bool, new_head: bool) -> PreTrainedModel:
    """Load a transformer with a head ``score`` that gives one number per token, and shard it over ``mesh``.

    Args:
        new_head: whether a checkpoint without a head will do, such as a language model; the head then starts at 0.

    Raises:
        ValueError: weights of the body are missing; or ``new_head`` is false and the checkpoint has no head, one of
            another size, or more than a head.
    """
    with _without_loading_report():
        model, loading = AutoModelForTokenClassification.from_pretrained(
            config.path,
            num_labels=1,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **_load_options(config),
        )
    missing = sorted({*loading["missing_keys"], *(entry[0] for entry in loading["mismatched_keys"])})
    if any(not name.startswith("score.") for name in missing):
        raise ValueError(f"{config.path}: {type(model).__name__} lacks {missing}")
    if not new_head:
        unknown = sorted(name for name in loading["unexpected_keys"] if not name.startswith("lm_head."))
        if "score.weight" in missing or unknown:
            found = f"has {unknown} besides" if unknown else "holds no head with one output"
            raise ValueError(
                f"reward_model.model.path={config.path!r}: {found}; name a model that "
                "AutoModelForSequenceClassification with num_labels=1 was saved from"
            )
    with torch.no_grad():
        # Zeros rather than transformers' random numbers: the same on every rank, and no opinion before learning.
        for name in missing:
            model.get_parameter(name).zero_()
    # Small differences between values matter: the head's products stay in float32.
    model.to(mesh.device_type)
    fully_shard(model.score, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.float32))
    return _shard(model, config, mesh, trainable)


@contextmanager
def _without_loading_report() -> Iterator[None]:
    """Keep ``transformers`` from warning of missing weights, which the caller looks at itself."""
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(verbosity)


def check_value_architecture(config: ModelConfig, field: str) -> None:
    """Whether ``transformers`` has a form of this architecture that :func:`load_sharded_value_model` can hold.

    Raises:
        ValueError: it has not; the message names the config's ``field``.
    """
    architecture = AutoConfig.from_pretrained(config.path, trust_remote_code=config.trust_remote_code, num_labels=1)
    known = type(architecture) in MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING
    with torch.device("meta"):
        if known and hasattr(AutoModelForTokenClassification.from_config(architecture), "score"):
            return
    raise ValueError(
        f"{field}={config.path!r}: transformers has no token classification form with a head named score for "
        f"{architecture.model_type}; it has for Llama, Mistral, Qwen2, Qwen3 and Gemma2, among others"
    )


def _load_options(config: ModelConfig) -> dict[str, Any]:
    return {
        "dtype": torch.float32,
        "attn_implementation": config.attn_implementation,
        "trust_remote_code": config.trust_remote_code,
    }


def _shard(model: PreTrainedModel, config: ModelConfig, mesh: DeviceMesh, trainable: bool) -> PreTrainedModel:
    """Shard ``model`` in place.

    Each decoder layer is a unit of its own, so that beside the embedding and the head only one layer's full parameters
    are in memory at a time.
    """
    model.requires_grad_(trainable)
    model.to(mesh.device_type)
    # Gradients are summed in float32 whatever the precision of the products: a sum over ranks must not lose bits.
    policy = MixedPrecisionPolicy(param_dtype=getattr(torch, config.param_dtype), reduce_dtype=torch.float32)
    unit_names = set(model._no_split_modules or [])
    for module in model.modules():
        if type(module).__name__ in unit_names:
            fully_shard(module, mesh=mesh, mp_policy=policy)
    # A model that learns needs embedding and head again in the backward pass, which starts where the forward ends.
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=not trainable)
    # Dropout would make log-probabilities of one policy differ between two forward passes.
    return model.eval()


def make_optimizer(model: nn.Module, config: OptimConfig, total_steps: int) -> tuple[torch.optim.AdamW, LambdaLR]:
    """AdamW over ``model``'s trainable parameters, with warm-up and decay over ``total_steps`` optimizer steps."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    betas = (config.betas[0], config.betas[1])
    optimizer = torch.optim.AdamW(parameters, lr=config.lr, betas=betas, weight_decay=config.weight_decay)
    return optimizer, LambdaLR(optimizer, lr_multiplier(config, total_steps))


def lr_multiplier(config: OptimConfig, total_steps: int) -> Callable[[int], float]:
    """The factor on the peak learning rate at a 0-based optimizer step: linear warm-up, then the chosen decay."""
    warmup, floor = config.lr_warmup_steps, config.min_lr_ratio
    decay_steps = max(1, total_steps - warmup)

    def multiplier(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        progress = min(1.0, (step - warmup) / decay_steps)
        if config.lr_scheduler_type == "linear":
            return 1.0 - (1.0 - floor) * progress
        if config.lr_scheduler_type == "cosine":
            return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * progress))
        return 1.0

    return multiplier


def clip_gradients(model: nn.Module, max_norm: float) -> float:
    """Scale gradients down to a global norm of at most ``max_norm``; returns the norm before.

    Raises:
        FloatingPointError: the norm is not finite; a step would destroy the model. It is the same on every rank.
    """
    total = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    norm = float(total.full_tensor() if isinstance(total, DTensor) else total)
    if not math.isfinite(norm):
        raise FloatingPointError(f"gradient norm is {norm}; lower the learning rate, or check the data and param_dtype")
    return norm


def full_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter by name, gathered one at a time; all ranks must walk through it together."""
    if isinstance(model, FSDPModule):
        # After a forward pass without a backward the root still holds its parameters whole, in ``param_dtype``.
        model.reshard()
    for name, parameter in model.named_parameters():
        value = parameter.detach()
        yield name, value.full_tensor() if isinstance(value, DTensor) else value
