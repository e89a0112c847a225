"""The memory that the processes of one vLLM engine share on a CPU."""

import glob
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vllm.distributed.device_communicators import cpu_communicator

from verl.utils.distributed import WorkerPlace

SHARED_MEMORY = Path("/dev/shm")


@contextmanager
def own_shared_memory(place: WorkerPlace) -> Iterator[None]:
    """Give the memory that the workers of one CPU engine share a name of its own while the engine starts.

    vLLM has none for workers that it did not launch: one engine would stand in another's way, and in that of the next
    what a killed one left. When this ends all of them have it, and the name goes, so that nothing is left. On a GPU
    nothing is shared this way.
    """
    group = getattr(cpu_communicator, "_CPUSHMDistributed", None)
    original = getattr(group, "make_group_name", None)
    if place.device_type != "cpu" or group is None or original is None:
        yield
        return
    names: set[str] = set()

    def make_group_name(communicator: Any) -> str:
        name = f"verl-{place.master_port}-{original(communicator).strip('/-')}"
        names.add(name)
        return name

    group.make_group_name = staticmethod(make_group_name)
    yield
    group.make_group_name = staticmethod(original)
    for name in names:
        for path in SHARED_MEMORY.glob(f"{glob.escape(name)}_*"):
            path.unlink(missing_ok=True)
