"""Finds or waits for machines of the Ray cluster that are alive, respond and have room for workers."""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from verl.cluster.failures import NoRoom, RequeueError
from verl.config.errors import ConfigError

LOOK_S = 1.0
"""Seconds between two checks of the number of machines."""
ANSWER_S = 20.0
"""Maximum number of seconds for a machine to start a process and respond."""
RESOURCES = {"cuda": "GPU", "cpu": "CPU"}
"""Maps each device type to the name of Ray's resource."""


Say = Callable[[str], None]
"""Function that prints a line for the user."""
Interrupt = Callable[[], None]
"""Function that is called at least once a second during a wait. If the function raises an exception, the wait ends."""


def never() -> None:
    """Do nothing. This default :data:`Interrupt` never ends a wait."""


class Machine(NamedTuple):
    """Machine of the cluster, as listed by Ray."""

    host: str
    resources: dict[str, float]
    """All resources, whether in use or free."""
    rank: str
    """Machine number if scripts/cluster.sh started Ray on the machine, otherwise empty."""


class MachineSetup(NamedTuple):
    """Settings for the workers on one machine."""

    cores: int
    """Number of cores that the workers share."""
    environment: dict[str, str]
    """Environment variables that apply only to this machine."""


def living_machines() -> dict[str, Machine]:
    """Return the machines that are alive, keyed by node id. Ray takes a while to notice that a machine is lost."""
    return {
        node["NodeID"]: Machine(node["NodeManagerHostname"], node["Resources"], node["Labels"].get("verl-rank", ""))
        for node in ray.nodes()
        if node["Alive"]
    }


def machines_with(count: int, device_type: str) -> dict[str, Machine]:
    """Return the machines that are alive and have at least ``count`` GPUs or CPUs, keyed by node id."""
    return {
        node: machine
        for node, machine in living_machines().items()
        if machine.resources.get(RESOURCES[device_type], 0) >= count
    }


def run_on(
    calls: Mapping[str, tuple[Any, ...]],
    function: Callable[..., Any],
    limit_s: float = ANSWER_S,
    interrupt: Interrupt = never,
) -> dict[str, Any]:
    """Run a function once on each machine. ``calls`` maps the machines' node ids to the function's arguments.

    Returns the results keyed by node id. Machines that were lost or did not respond within ``limit_s`` are omitted.
    Raises ``RayTaskError`` if the function raised an exception.
    """
    task: Any = ray.remote(function)
    alive, results, deadline = living_machines(), {}, time.monotonic() + limit_s
    pending = {
        task.options(
            num_cpus=0, max_retries=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)
        ).remote(*arguments): node
        for node, arguments in calls.items()
        if node in alive
    }
    while pending and time.monotonic() < deadline:
        interrupt()
        for call in ray.wait(list(pending), timeout=LOOK_S)[0]:
            node = pending.pop(call)
            try:
                results[node] = ray.get(call)
            except RayTaskError:
                raise
            except RayError:
                continue  # its machine is lost
        # Ray would wait forever for a reply from a lost machine.
        alive = living_machines()
        pending = {call: node for call, node in pending.items() if node in alive}
    return results


def wait_for_machines(
    nnodes: int, workers_per_node: int, device_type: str, timeout_s: float, say: Say, interrupt: Interrupt = never
) -> None:
    """Wait until ``nnodes`` machines have room for a run's workers, and log how many have joined.

    Raises ``ConfigError`` after ``timeout_s`` seconds. The message lists the joined and, if known, missing machines.
    """
    resource = RESOURCES[device_type]
    for there, waited in _counts(lambda: len(machines_with(workers_per_node, device_type)), nnodes, say, interrupt):
        if waited > timeout_s:
            raise ConfigError(
                f"trainer.nnodes={nnodes}: {there} of {nnodes} machines with {workers_per_node} {resource}s each were "
                f"there within trainer.machines_timeout_s={timeout_s:g}: {_describe(nnodes, resource)}"
            )


def gather_machines(
    nnodes: int,
    min_nnodes: int,
    workers_per_node: int,
    device_type: str,
    limit_s: float,
    say: Say,
    interrupt: Interrupt,
) -> int:
    """Wait for ``nnodes`` machines before a restart, or ``min_nnodes`` after ``limit_s``, and return the number.

    Raises ``RequeueError`` if fewer than ``min_nnodes`` machines respond after 2 * ``limit_s`` seconds.
    """
    for there, waited in _counts(lambda: _answering(workers_per_node, device_type), nnodes, say, interrupt):
        if waited >= limit_s and there >= min_nnodes:
            say(f"going on with {there} of {nnodes} machines")
            return there
        if waited >= 2 * limit_s:
            raise RequeueError(f"{there} of {nnodes} machines are left after {waited:.0f} s; {min_nnodes} are needed")
    return nnodes


def wait_for_room(
    groups: Sequence[tuple[int, int]], device_type: str, limit_s: float, say: Say, interrupt: Interrupt
) -> None:
    """Wait until the cluster has room for all ``groups`` at once, each a pair (machines, workers per machine).

    Raises ``NoRoom`` if there is not enough room after ``limit_s`` seconds.
    """
    resource = RESOURCES[device_type]

    def room() -> int:
        return int(fit([int(each.resources.get(resource, 0)) for each in living_machines().values()], groups))

    for _, waited in _counts(room, 1, lambda _: say("waiting for machines with room for rollout.nnodes"), interrupt):
        if waited > limit_s:
            (nnodes, per_node), (pool_nnodes, pool_per_node) = groups
            raise NoRoom(
                f"{nnodes} machines with {per_node} {resource}s each for the trainer and {pool_nnodes} with "
                f"{pool_per_node} for rollout.nnodes were not there within trainer.machines_timeout_s={limit_s:g}: "
                f"{_describe(0, resource)}"
            )


def fit(sizes: Sequence[int], groups: Sequence[tuple[int, int]]) -> bool:
    """Return whether ``groups``, pairs of (machines, devices per machine), fit on machines with ``sizes`` devices.

    Each group uses the smallest machines that have enough room.
    """
    free = list(sizes)
    for nnodes, per_node in sorted(groups, key=lambda group: -group[1]):
        chosen = sorted((left, i) for i, left in enumerate(free) if left >= per_node)[:nnodes]
        if len(chosen) < nnodes:
            return False
        for _, i in chosen:
            free[i] -= per_node
    return True


def _counts(count: Callable[[], int], nnodes: int, say: Say, interrupt: Interrupt) -> Iterator[tuple[int, float]]:
    """Yield the number of machines and the elapsed seconds, and log changes, until there are ``nnodes`` machines."""
    started, seen = time.monotonic(), -1
    while (there := count()) < nnodes:
        yield there, time.monotonic() - started
        if there != seen:
            say(f"{there} of {nnodes} machines here; waiting for the others")
        seen, until = there, time.monotonic() + LOOK_S
        while time.monotonic() < until:
            interrupt()
            time.sleep(0.1)


def _answering(workers_per_node: int, device_type: str) -> int:
    """Count the machines that have room for workers and respond, since Ray also lists unreachable machines."""
    machines = machines_with(workers_per_node, device_type)
    return len(machines) if len(machines) == 1 else len(run_on(dict.fromkeys(machines, ()), never))


def _describe(nnodes: int, resource: str) -> str:
    """Return one line that lists the joined machines with their amount of ``resource``, and the missing machines."""
    machines = living_machines().values()
    text = ", ".join(sorted(f"{one.host} ({one.resources.get(resource, 0):g} {resource}s)" for one in machines))
    ranks = {machine.rank for machine in machines}
    if "0" in ranks:  # started by scripts/cluster.sh, which assigns ranks
        hosts = os.environ.get("VERL_HOSTS", "").split()
        names = [f"NODE_RANK {rank}" for rank in range(nnodes) if str(rank) not in ranks]
        missing = [hosts[rank] for rank in range(len(hosts)) if str(rank) not in ranks] or names
        text += f"; missing: {', '.join(missing)}" if missing else ""
    return text
