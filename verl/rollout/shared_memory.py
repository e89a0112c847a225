"""Memory shared by the processes of one vLLM engine on a CPU."""

import glob
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vllm.distributed.device_communicators import cpu_communicator

from verl.utils.distributed import WorkerPlace

SHARED_MEMORY = Path("/dev/shm")


@contextmanager
def private_shared_memory(place: WorkerPlace) -> Iterator[None]:
    """Use a unique name for the shared memory of a CPU engine's workers while the engine starts.

    vLLM uses the same name in every engine for workers that it did not launch, so engines on one machine would collide
    with each other or with leftovers of a killed engine. The name is removed as soon as every worker has tried to open
    the memory, so a worker that is killed later leaves nothing behind. GPU engines do not share memory this way.
    """
    memory: Any = getattr(cpu_communicator, "_CPUSHMDistributed", None)
    if place.device_type != "cpu" or memory is None:
        yield
        return
    name_of, open_memory = memory.make_group_name, memory._init_cpu_shm

    def private_name(communicator: Any) -> str:
        return f"verl-{place.master_port}-{name_of(communicator).strip('/-')}"

    def open_and_remove_name(self: Any) -> Any:
        try:
            return open_memory(self)
        finally:
            for path in SHARED_MEMORY.glob(f"{glob.escape(self.group_name)}_*"):
                path.unlink(missing_ok=True)

    memory.make_group_name, memory._init_cpu_shm = staticmethod(private_name), open_and_remove_name
    try:
        yield
    finally:
        memory.make_group_name, memory._init_cpu_shm = staticmethod(name_of), open_memory
