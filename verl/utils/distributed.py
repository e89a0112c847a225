"""Joining the worker group's ``torch.distributed`` world, on GPUs with nccl or on CPUs with gloo."""

import os
import random
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


@dataclass(frozen=True)
class WorkerPlace:
    """Where one worker stands in its group."""

    rank: int
    world_size: int
    master_addr: str
    master_port: int
    device_type: str
    """``cpu`` or ``cuda``."""
    cpu_threads: int
    """Threads for CPU kernels; the machine's cores divided among its workers."""


def join_world(place: WorkerPlace) -> DeviceMesh:
    """Join the process group and return the one-dimensional data-parallel mesh over all workers.

    vLLM's ``external_launcher`` reads the same environment variables that torchrun would have set.
    """
    os.environ.update(
        RANK=str(place.rank),
        LOCAL_RANK="0",  # Ray shows each worker its own device alone
        WORLD_SIZE=str(place.world_size),
        MASTER_ADDR=place.master_addr,
        MASTER_PORT=str(place.master_port),
    )
    if place.device_type == "cuda":
        torch.cuda.set_device(0)
    else:
        torch.set_num_threads(place.cpu_threads)
    backend = "cpu:gloo,cuda:nccl" if place.device_type == "cuda" else "gloo"
    dist.init_process_group(backend, rank=place.rank, world_size=place.world_size)
    return init_device_mesh(place.device_type, (place.world_size,), mesh_dim_names=("dp",))


def seed_everything(seed: int) -> None:
    """Seed the global generators of Python, NumPy and torch."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
