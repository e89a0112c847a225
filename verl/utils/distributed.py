"""Joins the ``torch.distributed`` world of a worker group, with NCCL on GPUs and gloo on CPUs."""

import errno
import os
import random
import socket
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # not re-exported by its annotations
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from verl.utils.process import keep_freed_memory


@dataclass(frozen=True)
class WorkerPlace:
    """Rank and connection settings of a worker in its group."""

    rank: int
    world_size: int
    master_addr: str
    master_port: int
    device_type: str
    """Type of the device, ``cpu`` or ``cuda``."""
    cpu_threads: int
    """Number of threads for CPU kernels: the machine's cores divided by the number of workers on it."""
    timeout_s: float | None = None
    """Timeout of collective operations, or None for torch's default."""


_timeout: timedelta | None = None


def join_world(place: WorkerPlace) -> DeviceMesh:
    """Initialize the process group and return a one-dimensional data-parallel mesh of all workers.

    The environment variables of torchrun are also set, because vLLM's ``external_launcher`` reads them.
    """
    os.environ.update(
        RANK=str(place.rank),
        LOCAL_RANK="0",  # Ray shows each worker only its own device
        WORLD_SIZE=str(place.world_size),
        MASTER_ADDR=place.master_addr,
        MASTER_PORT=str(place.master_port),
    )
    if place.device_type == "cuda":
        torch.cuda.set_device(0)
    else:
        torch.set_num_threads(place.cpu_threads)
        keep_freed_memory()
    backend = "cpu:gloo,cuda:nccl" if place.device_type == "cuda" else "gloo"
    global _timeout
    _timeout = timeout = None if place.timeout_s is None else timedelta(seconds=place.timeout_s)
    is_master = place.rank == 0
    # Anyone who can connect to the store's port can write to it, and torch itself would listen on all interfaces. The
    # store closes the socket.
    listener = listening_socket(place.master_addr, place.master_port).detach() if is_master else None
    store = TCPStore(
        place.master_addr,
        place.master_port,
        place.world_size,
        is_master=is_master,
        timeout=timeout or default_pg_timeout,
        wait_for_workers=False,
        master_listen_fd=listener,
    )
    dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.world_size, timeout=timeout)
    return init_device_mesh(place.device_type, (place.world_size,), mesh_dim_names=("dp",))


def collective_timeout() -> timedelta | None:
    """Return the timeout set by :func:`join_world`. New groups need it to replace torch's default."""
    return _timeout


def listening_socket(host: str, port: int) -> socket.socket:
    """Create a socket that listens on the local address ``host``, or on all addresses if ``host`` is not local.

    Raises ``OSError`` if the port is in use.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        try:
            listener.bind((host, port))
        except OSError as error:
            # Behind NAT, other machines reach this machine at an address that is not local.
            if error.errno != errno.EADDRNOTAVAIL and not isinstance(error, socket.gaierror):
                raise
            listener.bind(("", port))
        listener.listen(1024)
    except OSError:
        listener.close()
        raise
    return listener


def seed_everything(seed: int) -> None:
    """Seed the global random generators of Python, NumPy and torch."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
