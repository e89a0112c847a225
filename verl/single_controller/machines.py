"""Which machines of the Ray cluster can be used now."""

import time
from collections.abc import Callable
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from verl.single_controller.failures import RequeueError

LOOK_S = 1.0
"""Seconds between two counts."""
ANSWER_S = 20.0
"""Seconds that a machine may take to start a process."""


def gather_machines(
    nnodes: int,
    min_nnodes: int,
    workers_per_node: int,
    device_type: str,
    limit_s: float,
    say: Callable[[str], None],
    interrupt: Callable[[], None],
) -> int:
    """Wait until ``nnodes`` machines answer, or ``limit_s`` later ``min_nnodes``; how many to use.

    Raises:
        RequeueError: twice ``limit_s`` later there are fewer.
    """
    started, shown = time.monotonic(), None
    while True:
        there = len(answering_machines(workers_per_node, device_type))
        waited = time.monotonic() - started
        if there >= nnodes:
            return nnodes
        if waited >= limit_s and there >= min_nnodes:
            say(f"going on with {there} of {nnodes} machines")
            return there
        if waited >= 2 * limit_s:
            raise RequeueError(f"{there} of {nnodes} machines are left after {waited:.0f} s; {min_nnodes} are needed")
        if there != shown:
            say(f"{there} of {nnodes} machines here; waiting for the others")
        shown = there
        until = time.monotonic() + LOOK_S
        while time.monotonic() < until:
            interrupt()
            time.sleep(0.1)


def answering_machines(workers_per_node: int, device_type: str) -> list[str]:
    """The node ids of machines with room for the workers that start a process when asked."""
    resource = "GPU" if device_type == "cuda" else "CPU"
    nodes = [
        node["NodeID"]
        for node in ray.nodes()
        if node["Alive"] and node["Resources"].get(resource, 0) >= workers_per_node
    ]
    if len(nodes) == 1:
        return nodes
    # Ray takes a while to find that a machine is cut off.
    task: Any = ray.remote(_answer)
    calls = {
        task.options(
            num_cpus=0, max_retries=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)
        ).remote(): node
        for node in nodes
    }
    done = ray.wait(list(calls), num_returns=len(calls), timeout=ANSWER_S)[0] if calls else []
    found = []
    for call in done:
        try:
            ray.get(call)
        except ray.exceptions.RayError:
            continue
        found.append(calls[call])
    return found


def _answer() -> None:
    pass
