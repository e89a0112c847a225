"""Fixtures that several tests of models share."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.kit import changed, ppo_config
from tests.models.worlds import World, world
from verl.config import PPOConfig
from verl.config.common import ModelConfig
from verl.workers.actor import Actor


@pytest.fixture(scope="session")
def model_config(tiny_model: Path) -> ModelConfig:
    """The shipped options of a model for the tiny one, sharded over all workers."""
    return replace(ppo_config("model.fsdp.fsdp_size=-1").model, path=str(tiny_model))


@pytest.fixture
def single_mesh(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[DeviceMesh]:
    """A world of this process alone, on a CPU unless the test asks for ``cuda``."""
    device = getattr(request, "param", "cpu")
    backend = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}[device]
    dist.init_process_group(backend, init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh(device, (1,), mesh_dim_names=("dp",))
    dist.destroy_process_group()


@pytest.fixture
def make_actor(small_config: PPOConfig, model_config: ModelConfig, single_mesh: DeviceMesh) -> Callable[..., Actor]:
    """Builder of actors of the tiny model, without a KL loss, with changes of their options."""

    def make(
        model: ModelConfig = model_config,
        correction: dict[str, Any] | None = None,
        temperature: float = 1.0,
        max_response_length: int = 9,
        **options: Any,
    ) -> Actor:
        weights = changed(small_config.algorithm.rollout_correction, **correction or {})
        actor = changed(small_config.actor, use_kl_loss=False, **options)
        return Actor(actor, weights, model, single_mesh, temperature, 10, max_response_length)

    return make


@pytest.fixture(scope="session")
def worlds() -> Iterator[dict[int, World]]:
    """Worlds of 1, 2 and 4 processes, which start with their first task."""
    with world(1) as one, world(2) as two, world(4) as four:
        yield {1: one, 2: two, 4: four}
