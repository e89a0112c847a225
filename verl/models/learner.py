"""AdamW for a sharded model, with a learning-rate schedule, gradient clipping, and gradient accumulation."""

import math
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR

from verl.config.common import OptimConfig
from verl.models.lora import adapter_dropout
from verl.models.offload import Offloaded

T = TypeVar("T")

NO_DETERMINISTIC = re.compile(r"^(\S+) does not have a deterministic implementation")
"""Pattern of torch's warning about an operation without a deterministic implementation."""


class Learner:
    """Optimizer and learning-rate schedule of a sharded model."""

    def __init__(
        self, model: nn.Module, config: OptimConfig, total_steps: int, offload: bool = False, parallel: int = 1
    ) -> None:
        """Create the optimizer and its schedule.

        Args:
            offload: whether to keep the optimizer state in host memory except during its step.
            parallel: number of workers in a sequence-parallel group, all of which compute the same part of the loss.
        """
        self.model = model
        self.sequence_parallel_size = parallel
        self.deterministic = False
        """Whether :meth:`step` uses torch's deterministic operations where available."""
        self.not_deterministic = set[str]()
        """Names of the operations used in :meth:`step` for which torch has no deterministic implementation."""
        self.grad_clip = config.grad_clip
        self.optimizer, self.scheduler = make_optimizer(model, config, total_steps)
        self.optimizer_state = Offloaded(self._state_tensors, offload)

    def step(
        self, micros: Sequence[T], loss_of: Callable[[T], tuple[Tensor, dict[str, Tensor]]]
    ) -> tuple[dict[str, float], dict[str, float]]:
        """Sum the gradients over micro-batches and ranks, then take one optimizer step.

        If the gradient norm is not finite, the optimizer step is skipped, but the schedule still advances.

        Args:
            micros: this rank's micro-batches; all ranks must have the same number.
            loss_of: function that returns a micro-batch's contribution to the step's loss, and metrics to sum. The
                contributions of all micro-batches and ranks add up to the loss.

        Returns:
            The metrics, summed over all micro-batches and ranks, and a dictionary with ``grad_norm``, ``lr`` and
            ``skipped_updates`` (1 if this step was skipped, else 0). Both are identical on every rank.
        """
        if not self.deterministic:
            return self._step(micros, loss_of)
        with deterministic_operations(self.not_deterministic):
            return self._step(micros, loss_of)

    def _step(
        self, micros: Sequence[T], loss_of: Callable[[T], tuple[Tensor, dict[str, Tensor]]]
    ) -> tuple[dict[str, float], dict[str, float]]:
        totals: dict[str, Tensor] = {}
        # Dropout masks must differ between steps and ranks, and a resumed run must reproduce them.
        seed = (torch.initial_seed() + self.scheduler.last_epoch * dist.get_world_size() + dist.get_rank()) % 2**63
        with adapter_dropout(self.model, seed):
            for index, micro in enumerate(micros, start=1):
                if isinstance(self.model, FSDPModule):
                    # Replicas (fsdp_size) reduce their gradients once, after the last micro-batch.
                    self.model.set_requires_all_reduce(index == len(micros))
                loss, sums = loss_of(micro)
                # FSDP averages gradients over ranks, but they must be summed: the losses of ranks add up, and workers
                # that share a sequence backpropagate through different tokens.
                (loss * dist.get_world_size()).backward()
                for name, value in sums.items():
                    # Keep the values on the device, because fetching them would synchronize.
                    value = value.detach().double()
                    totals[name] = totals.get(name, torch.zeros_like(value)) + value
        grad_norm = clip_gradients(self.model, self.grad_clip)
        skipped = not math.isfinite(grad_norm)
        if not skipped:
            with self.optimizer_state.loaded():
                self.optimizer.step()
        # Free the gradients, because the rollout engine needs their memory.
        self.optimizer.zero_grad()
        learning_rate = float(self.scheduler.get_last_lr()[0])
        self.scheduler.step()
        # Sort the names, because a custom loss may return its metrics in a different order on each rank.
        names = sorted(totals)
        summed = torch.stack([totals[name] for name in names])
        dist.all_reduce(summed)
        averages: list[float] = (summed / self.sequence_parallel_size).tolist()
        state = {"grad_norm": grad_norm, "lr": learning_rate, "skipped_updates": float(skipped)}
        return dict(zip(names, averages, strict=True)), state

    def _state_tensors(self) -> list[Tensor]:
        # Exclude AdamW's step counts, which are scalars on the CPU.
        entries = (value for state in self.optimizer.state.values() for value in state.values())
        return [value for value in entries if isinstance(value, Tensor) and value.dim() > 0]


@contextmanager
def deterministic_operations(missing: set[str]) -> Iterator[None]:
    """Use deterministic operations inside the block; add the names of nondeterministic operations to ``missing``.

    The setting applies to the whole process. The setting must be off while an engine samples, because the cumulative
    sum used to draw tokens has no deterministic implementation on a GPU.
    """
    options: Any = torch.utils.deterministic
    fills = options.fill_uninitialized_memory
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.use_deterministic_algorithms(True, warn_only=True)
        # Filling new buffers only helps to find operations that read them before writing.
        options.fill_uninitialized_memory = False
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)
            options.fill_uninitialized_memory = fills
    for warning in caught:
        found = NO_DETERMINISTIC.match(str(warning.message))
        if found:
            missing.add(found[1])
        else:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)


def make_optimizer(model: nn.Module, config: OptimConfig, total_steps: int) -> tuple[torch.optim.AdamW, LambdaLR]:
    """Create AdamW for the trainable parameters, and a learning-rate schedule of ``total_steps`` optimizer steps."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    betas = (config.betas[0], config.betas[1])
    optimizer = torch.optim.AdamW(
        parameters, lr=config.lr, betas=betas, eps=config.eps, weight_decay=config.weight_decay
    )
    return optimizer, LambdaLR(optimizer, lr_multiplier(config, total_steps))


def lr_multiplier(config: OptimConfig, total_steps: int) -> Callable[[int], float]:
    """Return a function that maps the 0-based step to the ratio of the learning rate to its peak."""
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
    """Clip gradients to a global norm of ``max_norm`` and return the norm before clipping, identical on every rank."""
    total = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    return float(total.full_tensor() if isinstance(total, DTensor) else total)
