"""Offloading in one process: without a device, and what only a GPU can tell."""

import pytest
import torch

from tests.models import sharding_cases as cases
from verl.models.fsdp import full_parameters, offloaded_parameters
from verl.models.learner import Learner
from verl.models.loading import load_sharded_model
from verl.models.offload import Offloaded, is_offloaded, piece_sizes

MIB = 1 << 20


def test_pinned_pieces_are_powers_of_two():
    # A shard of a 7B model's gate_proj over 8 workers: in one piece torch would take 64 MiB for these 32.4.
    sizes = piece_sizes(18944 * 3584 * 4 // 8)
    assert sizes == [32 * MIB, 18944 * 3584 * 4 // 8 - 32 * MIB]
    for num_bytes in (1, MIB - 1, MIB, 3 * MIB, 7 * MIB + 5, 4 * 152064 * 3584):
        sizes = piece_sizes(num_bytes)
        assert sum(sizes) == num_bytes and all(sizes)
        rounded = [1 << (size - 1).bit_length() for size in sizes]
        assert rounded[:-1] == sizes[:-1] and sum(rounded) - num_bytes < MIB


def test_tensors_of_several_pieces_come_back_as_they_were():
    tensors = [torch.randn(size) for size in (5, MIB // 4, 3 * MIB // 4 + 1)]
    expected = [tensor.clone() for tensor in tensors]
    offloaded = Offloaded(lambda: tensors, enabled=True)
    assert [len(pieces) for _, pieces in offloaded._on_host] == [1, 1, 3]
    assert all(map(is_offloaded, tensors))
    for _ in range(2):
        with offloaded.loaded():
            assert all(map(torch.equal, tensors, expected))
        assert all(map(is_offloaded, tensors))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("single_mesh", ["cuda"], indirect=True)
def test_memory_of_a_gpu_is_free_between_phases(single_mesh, model_config):
    model = load_sharded_model(model_config, single_mesh, trainable=True)
    num_bytes = 4 * model.num_parameters()
    parameters = offloaded_parameters(model, enabled=True)
    learner = Learner(model, cases.OPTIM, 10, offload=True)
    ids = cases.batch().cuda()
    for _ in range(2):
        with parameters.loaded():
            loss = -cases.logprobs(model, ids).mean()
            learner.step([loss], lambda loss: (loss, {"loss": loss}))
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
