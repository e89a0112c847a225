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
def private_shared_memory(place: WorkerPlace) -> Iterator[None]:
    """While a CPU engine starts, give the memory that its workers share a name that no other engine uses.

    vLLM gives workers that it did not launch the same name in every engine, so engines on one machine, or the leftovers
    of a killed one, would collide. When the block ends every worker has opened the memory, and its name is removed, so
    nothing is left behind. GPU engines do not share memory this way.
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
