"""What several tests of models share."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.models.worlds import World, world
from verl.config import PPOConfig, load_config
from verl.config.common import ModelConfig

TINY = {"vocab_size": 101, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "pad_token_id": 0}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.2}
"""Sizes of random models: heads in groups, weights large enough for attention to be sharp."""


@pytest.fixture(scope="session")
def model_config(tiny_model: Path) -> ModelConfig:
    """The shipped options of a model, for the tiny one, sharded over all workers."""
    return replace(load_config(PPOConfig, "ppo_trainer", ["model.fsdp.fsdp_size=-1"]).model, path=str(tiny_model))


@pytest.fixture
def single_mesh(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[DeviceMesh]:
    """A world of this process alone, on a CPU unless the test asks for ``cuda``."""
    device = getattr(request, "param", "cpu")
    backend = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}[device]
    dist.init_process_group(backend, init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh(device, (1,), mesh_dim_names=("dp",))
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def worlds() -> Iterator[dict[int, World]]:
    """Worlds of 1, 2 and 4 processes, which start with their first task."""
    with world(1) as one, world(2) as two, world(4) as four:
        yield {1: one, 2: two, 4: four}
