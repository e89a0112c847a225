"""Worker groups of the tests, and how their gradients are taken and compared."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from verl.batch import Batch
from verl.config import PPOConfig
from verl.config.rollout import SamplingConfig
from verl.data.prompt_record import PromptRecord
from verl.data.prompts import PromptDataset
from verl.models.learner import Learner
from verl.rollout.engines import engine_environment
from verl.single_controller.generation import generate_responses
from verl.single_controller.worker_group import WorkerGroup


def start_group(
    config: PPOConfig, world_size: int, device_type: str = "cpu", worker: str = "ProbeWorker"
) -> WorkerGroup:
    """Probe workers, for runs of ten steps."""
    # Where packages are found by it, as on a machine that got them in a folder, so they are by the workers.
    paths = filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")])
    environment = engine_environment(device_type, config.rollout.name) | {"PYTHONPATH": os.pathsep.join(paths)}
    if device_type == "cuda":
        environment["TRITON_F32_DEFAULT"] = "ieee"  # otherwise, vLLM's attention multiplies float32 in TF32
    return WorkerGroup(f"probes:{worker}", config, (10, config.rollout.stop), 1, world_size, device_type, environment)


def all_prompts(config: PPOConfig, tokenizer: PreTrainedTokenizerBase) -> list[PromptRecord]:
    """The training prompts."""
    return PromptDataset(config.data.train_files, tokenizer, config.data).records


def sample(
    group: WorkerGroup,
    prompts: list[PromptRecord],
    sampling: SamplingConfig,
    seed: int,
    copies: int = 1,
    **options: Any,
) -> Batch:
    """Responses of at most 12 tokens from engines of ``copies`` workers."""
    return generate_responses(group, copies, prompts, sampling, seed, 12, **options)


def scored(group: WorkerGroup, batch: Batch) -> Batch:
    """What the policy says of the responses."""
    return Batch.join(group.run_split("compute_logprobs", batch))


def policy_batch(batch: Batch, old_logprobs: Tensor) -> Batch:
    """The responses with random advantages, and a reference near the old policy."""
    torch.manual_seed(0)
    rows = batch.columns("tokens", "rollout_logprobs")
    return rows.fill(
        learn_mask=torch.ones_like(old_logprobs, dtype=torch.bool),
        old_logprobs=old_logprobs,
        ref_logprobs=old_logprobs + 0.1 * torch.randn(old_logprobs.shape),
        advantages=torch.randn(len(batch)).repeat_interleave(batch.response_lengths),
    )


def gradients_of(learner: Learner, update: Callable[[], Any]) -> tuple[Any, dict[str, Tensor]]:
    """What ``update`` returns, and the full gradients of its optimizer step, which is not applied."""
    gradients: dict[str, Tensor] = {}

    def keep() -> None:
        named = learner.model.named_parameters()
        gradients.update((name, p.grad.full_tensor()) for name, p in named if p.requires_grad)

    apply, learner.optimizer.step = learner.optimizer.step, keep  # type: ignore[method-assign]
    returned = update()
    learner.optimizer.step = apply  # type: ignore[method-assign]
    return returned, gradients


def relative_difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Norm of the difference of all gradients over the norm of the first."""
    flat_a, flat_b = (torch.cat([grads[name].flatten().double() for name in sorted(grads)]) for grads in (a, b))
    return ((flat_a - flat_b).norm() / flat_a.norm()).item()
