"""Adds noise to a policy's parameters to check that engines sample with the weights that they receive."""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from verl.models.offload import local_part, reshard

SCALE = 0.2
"""Standard deviation of the noise, relative to a shard's root mean square, or absolute for a shard of zeros."""


@torch.no_grad()
def add_noise(model: PreTrainedModel) -> list[Tensor]:
    """Add Gaussian noise to all parameters of a loaded model in place, and return host copies of the original shards.

    The noise depends only on the parameter and its shard, so that ranks with equal shards add equal noise.
    """
    reshard(model)
    copies = []
    for shard in map(local_part, model.parameters()):
        copies.append(shard.to("cpu", copy=True))
        if shard.numel():
            noise = torch.randn(shard.shape, generator=torch.Generator().manual_seed(len(copies)))
            scale = shard.float().square().mean().sqrt().item() or 1.0
            shard.add_((SCALE * scale * noise).to(shard))
    return copies


@torch.no_grad()
def restore_parameters(model: PreTrainedModel, copies: list[Tensor]) -> None:
    """Copy the shards returned by :func:`add_noise` back into the loaded model."""
    reshard(model)
    for shard, copy in zip(map(local_part, model.parameters()), copies, strict=True):
        shard.copy_(copy)
