"""The machines of the Ray cluster: which live, have room for workers and answer; and waiting for them."""

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from verl.config.errors import ConfigError
from verl.single_controller.failures import RequeueError

LOOK_S = 1.0
"""Seconds between two counts."""
ANSWER_S = 20.0
"""Seconds that a machine may take to start a process."""


class Machine(NamedTuple):
    """What Ray knows of a machine."""

    host: str
    resources: dict[str, float]
    """In use or not."""
    rank: str
    """Its number, if scripts/cluster.sh has started Ray there; otherwise empty."""


def living_machines() -> dict[str, Machine]:
    """Node id -> machine. Ray takes a while to find that one is gone."""
    return {
        node["NodeID"]: Machine(node["NodeManagerHostname"], node["Resources"], node["Labels"].get("verl-rank", ""))
        for node in ray.nodes()
        if node["Alive"]
    }


def machines_with(count: int, device_type: str) -> dict[str, Machine]:
    """The living machines that have so many GPUs, or CPUs."""
    resource = _resource(device_type)
    return {node: found for node, found in living_machines().items() if found.resources.get(resource, 0) >= count}


def run_on(calls: Mapping[str, tuple[Any, ...]], function: Callable[..., None], limit_s: float = ANSWER_S) -> set[str]:
    """Run a function once on each of some machines.

    Args:
        calls: node id -> the function's arguments there.

    Returns:
        The ids of those that ran it within ``limit_s``.
    """
    task: Any = ray.remote(function)
    alive, done, deadline = living_machines(), set(), time.monotonic() + limit_s
    pending = {
        task.options(
            num_cpus=0, max_retries=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)
        ).remote(*arguments): node
        for node, arguments in calls.items()
        if node in alive
    }
    while pending and time.monotonic() < deadline:
        for call in ray.wait(list(pending), timeout=LOOK_S)[0]:
            node = pending.pop(call)
            with suppress(ray.exceptions.RayError):
                ray.get(call)
                done.add(node)
        alive = living_machines()
        pending = {call: node for call, node in pending.items() if node in alive}
    return done


def wait_for_machines(
    nnodes: int,
    workers_per_node: int,
    device_type: str,
    timeout_s: float,
    say: Callable[[str], None],
    interrupt: Callable[[], None] = lambda: None,
) -> None:
    """Before a run: wait until ``nnodes`` machines have room for the workers, with a line for every one that comes.

    Args:
        interrupt: called again and again; what it raises ends the wait.

    Raises:
        ConfigError: after ``timeout_s`` seconds; says which are there, and which are missing as far as that is known.
    """
    deadline, seen = time.monotonic() + timeout_s, -1
    while (there := len(machines_with(workers_per_node, device_type))) < nnodes:
        if there != seen:
            say(f"{there} of {nnodes} machines here")
        seen = there
        if time.monotonic() > deadline:
            resource = _resource(device_type)
            raise ConfigError(
                f"trainer.nnodes={nnodes}: {there} of {nnodes} machines with {workers_per_node} {resource}s each were "
                f"there within trainer.machines_timeout_s={timeout_s:g}: {_describe(nnodes, resource)}"
            )
        _pause(interrupt)


def gather_machines(
    nnodes: int,
    min_nnodes: int,
    workers_per_node: int,
    device_type: str,
    limit_s: float,
    say: Callable[[str], None],
    interrupt: Callable[[], None],
) -> int:
    """Before a restart: wait until ``nnodes`` machines answer, or ``limit_s`` later ``min_nnodes``; how many to use.

    Raises:
        RequeueError: twice ``limit_s`` later there are fewer.
    """
    started, seen = time.monotonic(), -1
    while (there := _answering(workers_per_node, device_type)) < nnodes:
        waited = time.monotonic() - started
        if waited >= limit_s and there >= min_nnodes:
            say(f"going on with {there} of {nnodes} machines")
            return there
        if waited >= 2 * limit_s:
            raise RequeueError(f"{there} of {nnodes} machines are left after {waited:.0f} s; {min_nnodes} are needed")
        if there != seen:
            say(f"{there} of {nnodes} machines here; waiting for the others")
        seen = there
        _pause(interrupt)
    return nnodes


def _answering(workers_per_node: int, device_type: str) -> int:
    """How many machines with room for the workers start a process when asked; Ray counts those that were cut off."""
    found = machines_with(workers_per_node, device_type)
    return len(found) if len(found) == 1 else len(run_on(dict.fromkeys(found, ()), _nothing))


def _nothing() -> None:
    pass


def _pause(interrupt: Callable[[], None]) -> None:
    until = time.monotonic() + LOOK_S
    while time.monotonic() < until:
        interrupt()
        time.sleep(0.1)


def _resource(device_type: str) -> str:
    return "GPU" if device_type == "cuda" else "CPU"


def _describe(nnodes: int, resource: str) -> str:
    """The machines that are there with what they have, and the numbers or names of those that never came."""
    machines = living_machines().values()
    text = ", ".join(sorted(f"{found.host} ({found.resources.get(resource, 0):g} {resource}s)" for found in machines))
    ranks = {found.rank for found in machines}
    if "0" in ranks:  # started by scripts/cluster.sh, which numbers them
        hosts = os.environ.get("VERL_HOSTS", "").split()
        names = [f"NODE_RANK {rank}" for rank in range(nnodes) if str(rank) not in ranks]
        missing = [hosts[rank] for rank in range(len(hosts)) if str(rank) not in ranks] or names
        text += f"; missing: {', '.join(missing)}" if missing else ""
    return text
