"""What only a GPU can tell of offloading: that its memory is let go of, and comes back unchanged."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.models import sharding_cases as cases
from verl.config import PPOConfig, load_config
from verl.models.fsdp import full_parameters, offloaded_parameters
from verl.models.learner import Learner
from verl.models.loading import load_sharded_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[DeviceMesh]:
    """A world of this process alone."""
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cuda", (1,), mesh_dim_names=("dp",))
    dist.destroy_process_group()


def test_memory_is_free_between_phases(mesh, tiny_model):
    config = replace(load_config(PPOConfig, "ppo_trainer").model, path=str(tiny_model))
    model = load_sharded_model(config, mesh, trainable=True)
    num_bytes = 4 * model.num_parameters()
    parameters = offloaded_parameters(model, enabled=True)
    learner = Learner(model, cases.OPTIM, 10, offload=True)
    ids = cases.batch().cuda()
    for _ in range(2):
        with parameters.loaded():
            loss = -cases.logprobs(model, ids).mean()
            learner.step([(loss, {"loss": loss})])
            del loss
    with parameters.loaded():
        learned = {name: value.clone() for name, value in full_parameters(model)}
    host = [piece for _, pieces in parameters._on_host for piece in pieces]
    assert host and all(tensor.is_pinned() for tensor in host)
    # Differences, for the libraries keep some memory of their own.
    away = torch.cuda.memory_allocated()
    with parameters.loaded():
        with_parameters = torch.cuda.memory_allocated()
        with learner.optimizer_state.loaded():
            with_all = torch.cuda.memory_allocated()
        torch.testing.assert_close(dict(full_parameters(model)), learned, atol=0, rtol=0)
    assert torch.cuda.memory_allocated() == away
    assert with_parameters - away >= num_bytes and with_all - with_parameters >= 2 * num_bytes
