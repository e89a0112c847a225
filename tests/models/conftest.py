"""What several tests of models share."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from verl.config import PPOConfig, load_config
from verl.config.common import ModelConfig


@pytest.fixture(scope="session")
def model_config(tiny_model: Path) -> ModelConfig:
    """The shipped options of a model, for the tiny one."""
    return replace(load_config(PPOConfig, "ppo_trainer").model, path=str(tiny_model))


@pytest.fixture
def single_mesh(tmp_path: Path) -> Iterator[DeviceMesh]:
    """A world of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    dist.destroy_process_group()
