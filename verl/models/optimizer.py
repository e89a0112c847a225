"""AdamW over a sharded model: its learning-rate schedule and gradient clipping."""

import math
from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR

from verl.config.common import OptimConfig


def make_optimizer(model: nn.Module, config: OptimConfig, total_steps: int) -> tuple[torch.optim.AdamW, LambdaLR]:
    """AdamW over ``model``'s trainable parameters, with warm-up and decay over ``total_steps`` optimizer steps."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    betas = (config.betas[0], config.betas[1])
    optimizer = torch.optim.AdamW(
        parameters, lr=config.lr, betas=betas, eps=config.eps, weight_decay=config.weight_decay
    )
    return optimizer, LambdaLR(optimizer, lr_multiplier(config, total_steps))


def lr_multiplier(config: OptimConfig, total_steps: int) -> Callable[[int], float]:
    """The factor on the peak learning rate at a 0-based optimizer step: linear warm-up, then the chosen decay."""
    warmup, floor = config.warmup_steps(total_steps), config.min_lr_ratio
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
    """Scale gradients down to a global norm of at most ``max_norm``; returns the norm before, the same on every rank.

    If it is not finite, a step on these gradients would destroy the model.
    """
    total = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    return float(total.full_tensor() if isinstance(total, DTensor) else total)
