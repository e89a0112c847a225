"""Policy losses as users write them, and what a world of workers makes of them."""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from tests.models.models_in_worlds import share
from tests.workers.groups import gradients_of
from verl.algorithms.losses import BatchSize, LossInputs, policy_loss
from verl.algorithms.losses.custom import COLUMNS, OLD_STATISTICS, STATISTICS
from verl.batch import Batch
from verl.config import PPOConfig
from verl.workers.actor import Actor


def above_median(mini_batch: LossInputs, **_: float) -> dict[str, Tensor]:
    """[B, R], and [B]."""
    entropy, mask = mini_batch.old_entropy, mini_batch.response_mask
    lead = mini_batch.scores - mini_batch.scores.mean()
    return {
        "kept": (entropy > entropy[mask].median()).float(),
        "lead": lead + mini_batch.old_statistics["logsumexp"].mean(),
    }


@policy_loss(
    columns=tuple(COLUMNS),
    statistics=STATISTICS,
    top_k=3,
    old_statistics=OLD_STATISTICS,
    whole_groups=True,
    prepare=above_median,
)
def everything(inputs: LossInputs, scale: float = 1.0) -> tuple[Tensor, dict[str, Tensor]]:
    """[b, R]: depends on all that there is, and on the other responses to the prompt."""
    found, old, mask = inputs.statistics, inputs.old_statistics, inputs.response_mask
    of_tokens = inputs.logprobs - inputs.old_logprobs + 0.1 * inputs.rollout_logprobs * inputs.entropy
    of_tokens = of_tokens - inputs.ref_logprobs * found["mean_logprob"] + 0.2 * found["logsumexp"]
    of_tokens = of_tokens + found["sum_pi_squared"] * inputs.advantages + found["top_k_logprobs"].square().mean(dim=2)
    of_tokens = of_tokens + (found["top_k_ids"] == inputs.tokens[..., None]).any(dim=2) * inputs.old_entropy
    of_tokens = of_tokens * inputs.prepared["kept"] - old["mean_logprob"] * inputs.logprobs * old["logsumexp"]
    of_rows = inputs.scores + inputs.rewards * inputs.correct + inputs.prepared["lead"] + 0.1 * inputs.lengths
    sums = torch.where(inputs.sampled_mask, inputs.logprobs, 0.0).sum(dim=1)
    groups, ones = inputs.groups, torch.ones_like(sums)
    means = torch.zeros_like(sums).index_add(0, groups, sums) / torch.zeros_like(sums).index_add(0, groups, ones).clamp(
        1
    )
    losses = of_tokens + (scale * of_rows * (sums - means[groups]))[:, None] * old["sum_pi_squared"]
    return losses, {"tokens": mask.sum(), "rows_mean": of_rows}


@policy_loss(statistics=("logsumexp",))
def of_one_response(inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """[b], without other responses."""
    sums = torch.where(inputs.response_mask, inputs.logprobs * inputs.statistics["logsumexp"], 0.0).sum(dim=1)
    return sums.square() / inputs.lengths + inputs.advantages[:, 0] * sums, {}


def learn(
    config: PPOConfig,
    rows: Batch,
    size: BatchSize,
    model: dict[str, Any],
    batching: dict[str, Any],
    on_policy: bool = False,
) -> tuple[Any, dict[str, Tensor]]:
    """What the actor returns of an update on a rank's share of ``rows``, and the whole gradient."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    options, correction = replace(config.actor, **batching), config.algorithm.rollout_correction
    actor = Actor(options, correction, replace(config.model, **model), mesh, 0.8, 10, size.max_length)
    mine = share(rows, model.get("ulysses_sequence_parallel_size", 1))
    update = actor.update_on_policy if on_policy else actor.update
    return gradients_of(actor.learner, lambda: update(mine, size.num_tokens, size.num_sequences))


def score(config: PPOConfig, rows: Batch) -> Batch:
    """What the policy says of the rows, on one rank."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    correction = config.algorithm.rollout_correction
    return Actor(config.actor, correction, config.model, mesh, 0.8, 10, rows.width).compute_logprobs(rows)
