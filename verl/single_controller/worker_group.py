"""Group of identical Ray actors (workers), whose methods are called on all workers at once."""

import os
import pkgutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import ray
import torch
from ray.exceptions import OutOfMemoryError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from torch.profiler import profile, record_function

from verl.batch import Batch
from verl.cluster.environment import is_secret
from verl.cluster.failures import (
    MachineError,
    NetworkError,
    NoRoom,
    OutOfMemory,
    WorkerError,
    is_network_error,
    is_out_of_memory,
    killed_for_memory_line,
    out_of_memory_line,
)
from verl.cluster.machines import RESOURCES, MachineSetup
from verl.cluster.network import free_port
from verl.config.errors import ConfigError
from verl.single_controller.heartbeat import HeartbeatSettings, follow
from verl.single_controller.profiling import MemoryPeak, PeakMemory
from verl.single_controller.supervision import START, Identity, Supervision, Supervisor, log_to
from verl.utils.distributed import WorkerPlace
from verl.utils.files import naming_storage
from verl.utils.process import available_cores, loading, restore_umask, set_stage

POLL_S = 0.5
"""Seconds between two supervision checks while workers are running."""
CAUSE_S = 5.0
"""Seconds to wait for the worker at the other end of a broken connection to fail as well."""

DEATHS = {
    "Worker unexpectedly exits": "its process was killed or crashed",
    "is unavailable": "Ray no longer reaches it",
}
"""Maps parts of Ray's messages about lost workers to their meanings, without Ray's guesses and internal names."""

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
WAIT_VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
SPIN_COUNT = "20000"
"""Number of times that an idle OpenMP thread polls before it sleeps (default: 300,000). On a busy machine, polling
threads take the core from the thread that they wait for (benchmarks/threads.md)."""


def thread_variables(threads: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables that set the number of threads and, unless already configured, their polling."""
    variables = dict.fromkeys(THREAD_VARIABLES, str(threads))
    if not any(name in os.environ or name in environment for name in WAIT_VARIABLES):
        variables[WAIT_VARIABLES[0]] = SPIN_COUNT
    return variables


def cpu_threads(workers_per_node: int, cores: int) -> int:
    """Return the number of threads per worker: OMP_NUM_THREADS if set, otherwise a worker's share of the cores."""
    # OpenMP accepts a list, whose first entry applies to the outermost level.
    wanted = os.environ.get(THREAD_VARIABLES[0], "").split(",")[0]
    return int(wanted) if wanted.isdecimal() else max(1, cores // workers_per_node)


class WorkerGroup:
    """Group of ``world_size`` workers whose methods are called on all workers at once.

    Args:
        worker: Worker class as ``module:name``, called as ``cls(config, place, *arguments)`` in each process. It is a
            string so that only the workers import its dependencies.
        nnodes: Number of machines.
        workers_per_node: Number of workers on each machine, one per GPU or one per CPU process.
        device_type: ``cpu`` or ``cuda``.
        environment: Environment variables that are set before the workers import anything. Secrets are set later, just
            before the worker is imported, because Ray logs the variables that it sets itself.
        survey: Function that inspects the machines of the placement group before workers start there, or None to assume
            that all machines resemble this one.
        supervision: Options for supervising the workers.
        workers_per_world: Number of consecutive ranks that form a ``torch.distributed`` world, or None for all of them.
        check_devices: Callback that receives the memory of each worker's GPU in bytes (0 on a CPU) before the workers
            load anything; if it raises, the workers are stopped.
        beside: Group whose machines and devices these workers share, or None to reserve others.
        device_share: Fraction of a GPU that Ray reserves for each worker. With 0.9, one worker of another group fits on
            the same GPU if it reserves 0.1, but two do not.

    On a CPU, each worker uses :func:`cpu_threads` threads.
    """

    options = "trainer"
    """Option group that contains ``nnodes`` and ``n_gpus_per_node``, named in error messages."""

    def __init__(
        self,
        worker: str,
        config: Any,
        arguments: tuple[Any, ...],
        nnodes: int,
        workers_per_node: int,
        device_type: str,
        environment: dict[str, str],
        survey: Callable[[PlacementGroup], list[MachineSetup]] | None = None,
        supervision: Supervision | None = None,
        check_devices: Callable[[list[int]], None] = lambda sizes: None,
        workers_per_world: int | None = None,
        beside: "WorkerGroup | None" = None,
        device_share: float = 1.0,
    ) -> None:
        self.workers_per_node = workers_per_node
        self.device_type = device_type
        self.world_size = nnodes * workers_per_node
        self._workers_per_world = workers_per_world or self.world_size
        self.living = list(range(self.world_size))
        """Ranks that receive calls."""
        self._peak: MemoryPeak | None = None
        self._beside, self._device_share = beside, device_share
        self._placement: PlacementGroup = self._reserve(nnodes) if beside is None else beside._placement
        try:
            machines = survey(self._placement) if survey else [MachineSetup(available_cores(), {})] * nnodes
        except BaseException:
            self._release()
            raise
        setups = [machines[rank // workers_per_node] for rank in range(self.world_size)]
        self._threads = [cpu_threads(workers_per_node, setup.cores) for setup in setups]
        shown = {name: value for name, value in environment.items() if not is_secret(name)}
        self._hidden = {name: value for name, value in environment.items() if is_secret(name)}
        self._variables = [
            thread_variables(self._threads[rank], setups[rank].environment) | setups[rank].environment | shown
            for rank in self.living
        ]
        self._made_from = (worker, config, arguments)
        self._workers: list[Any] = [self._new_process(rank) for rank in self.living]
        self._supervisor = Supervisor(supervision or Supervision())
        try:
            identities = self._wait([self._prepare(rank, self._workers[rank]) for rank in self.living], START)
            self._supervisor.identities = identities
            check_devices([identity.device_memory for identity in identities])
            starts = [self._start(rank, self._workers[rank], identities) for rank in self.living]
            self.device_name: str = self._gather(starts, START)[0]
            """Name of worker 0's GPU, or an empty string on a CPU."""
        except BaseException:
            # The other workers may be waiting for the failed one, and would keep their resources reserved.
            self.close()
            raise

    def _reserve(self, nnodes: int) -> PlacementGroup:
        """Reserve one bundle per machine in rank order, so that consecutive ranks share a machine."""
        resource, per_node = RESOURCES[self.device_type], float(self.workers_per_node)
        bundle = {"CPU": per_node, resource: per_node}
        strategy = "STRICT_SPREAD" if nnodes > 1 else "PACK"
        placement: PlacementGroup = placement_group([bundle.copy() for _ in range(nnodes)], strategy=strategy)
        if not placement.wait(timeout_seconds=60):
            remove_placement_group(placement)
            raise NoRoom(
                f"{nnodes} machines with {self.workers_per_node} free {resource}s each are needed; the Ray cluster has "
                f"{ray.cluster_resources().get(resource, 0):g} in all. Lower {self.options}.n_gpus_per_node or "
                f"{self.options}.nnodes"
            )
        return placement

    def _release(self) -> None:
        if self._beside is None:
            remove_placement_group(self._placement)

    def _new_process(self, rank: int) -> Any:
        actor_class: Any = ray.remote(_Host)
        return actor_class.options(
            num_cpus=1 if self._beside is None else 0,
            num_gpus=self._device_share if self.device_type == "cuda" else 0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._placement, rank // self.workers_per_node),
            runtime_env={"env_vars": self._variables[rank]},
        ).remote()

    def _prepare(self, rank: int, host: Any) -> Any:
        """Start preparing a process, and return a reference to its :class:`Identity`."""
        options, heartbeat = self._supervisor.options, self._supervisor.heartbeat.settings
        return host.prepare.remote(rank, os.getcwd(), self._hidden, heartbeat, options.logs, self.device_type)

    def _start(self, rank: int, host: Any, identities: Sequence[Identity]) -> Any:
        """Start a worker and return a reference to its reply, which contains the name of its GPU, or "" on a CPU."""
        (worker, config, arguments), size = self._made_from, self._workers_per_world
        address, port = identities[rank - rank % size].meeting_point
        own = (self.device_type, self._threads[rank], self._supervisor.options.collective_timeout_s)
        return host.start.remote(worker, config, WorkerPlace(rank % size, size, address, port, *own), arguments)

    def run(self, method: str, *arguments: Any) -> list[Any]:
        """Call ``method`` with the same arguments on every worker and return the results in rank order.

        A dotted name, such as ``actor.update``, calls a method of one of the worker's attributes.

        Values that a method yields stay in Ray's object store, and the result is a :class:`Stored` object to pass to
        other methods. Raises ``WorkerError`` if a worker raises an exception or dies.
        """
        return self._gather([self.call(rank, method, arguments) for rank in self.living], method)

    def run_living(self, method: str, *arguments: Any) -> list[Any]:
        """Like :meth:`run`, but subclasses may lose workers during the call and return only the others' results."""
        return self.run(method, *arguments)

    def leave_out(self, error: MachineError) -> int:
        """Remove the lost worker and all other workers of its world, and return the lost worker's rank.

        The base class raises ``error``, because its workers cannot continue without the lost one.
        """
        raise error

    def run_split(self, method: str, batch: Batch, *arguments: Any, ranks_per_share: int = 1) -> list[Any]:
        """Like :meth:`run`, but pass each worker one contiguous share of ``batch``, in rank order.

        The sizes of shares differ by at most one. A batch with fewer samples than shares raises ``ValueError``, because
        idle ranks would hang the others. ``ranks_per_share`` consecutive workers process the same share, which is
        stored only once, and only the first of them returns its result.
        """
        size, num_shares = len(batch), self.world_size // ranks_per_share
        if size < num_shares:
            raise ValueError(f"{method}: a batch of {size} cannot be split over {num_shares} workers")
        bounds = [size * share // num_shares for share in range(num_shares + 1)]
        shares = [ray.put(batch[start:stop]) for start, stop in pairwise(bounds)]
        calls = [
            worker.call.remote(method, arguments, shares[rank // ranks_per_share], sends=rank % ranks_per_share == 0)
            for rank, worker in enumerate(self._workers)
        ]
        return self._gather(calls, method)[::ranks_per_share]

    def call(self, rank: int, method: str, arguments: tuple[Any, ...]) -> Any:
        """Start a call to one worker, for use by :class:`verl.single_controller.generation.EngineCalls`."""
        return self._workers[rank].call.remote(method, arguments)

    def take_peak_memory(self) -> MemoryPeak | None:
        """Return the peak memory of any worker since the last call to this method, or None if no worker was called."""
        peak, self._peak = self._peak, None
        return peak

    def start_profile(self) -> None:
        """Start torch's profiler in every worker."""
        self._wait([worker.start_profile.remote() for worker in self._workers], "start_profile")

    def stop_profile(self, paths: list[Path]) -> None:
        """Stop torch's profiler and write one trace per worker, on the worker's machine.

        The paths must end in ``.json.gz``. The files can be opened in chrome://tracing and https://ui.perfetto.dev.
        """
        calls = [worker.stop_profile.remote(path) for worker, path in zip(self._workers, paths, strict=True)]
        self._wait(calls, "stop_profile")

    def close(self) -> None:
        try:
            # If the head is gone, there are no resources to release, and trying would block for a minute.
            if self._supervisor.head_answers():
                for worker in self._workers:
                    ray.kill(worker)
                with suppress(RayError):
                    self._release()
        finally:
            self._supervisor.close()

    def _gather(self, calls: list[Any], method: str) -> list[Any]:
        """Return the results of the calls, and record their peak memory for ``take_peak_memory``."""
        return [self.received(reply) for reply in self._wait(calls, method)]

    def received(self, reply: tuple[Any, MemoryPeak]) -> Any:
        """Return the result in a worker's reply, and record its peak memory for ``take_peak_memory``."""
        result, peak = reply
        self._peak = peak.joined(self._peak)
        return result

    def _wait(self, calls: list[Any], method: str) -> list[Any]:
        """Wait for the results of the calls, one per worker, and return them in order."""
        ranks = dict(zip(calls, self.living, strict=True))
        results = dict(self.completed(ranks, method, time.monotonic()))
        return [results[call] for call in calls]

    def completed(self, calls: Mapping[Any, int], method: str, started: float) -> Iterator[tuple[Any, Any]]:
        """Yield each call and its result as soon as the call completes. ``calls`` maps calls to ranks.

        The first failure is raised immediately, because other workers may hang while they wait for the failed one.

        Args:
            started: Start of the time limit on the monotonic clock.
        """
        pending = list(calls)
        while pending:
            # Check before every wait, not only after a timeout, which never occurs if engines keep replying.
            self._supervisor.check(method, time.monotonic() - started)
            done, pending = ray.wait(pending, num_returns=1, timeout=POLL_S)
            results = {call: _outcome(call) for call in done}
            for call, result in results.items():
                if isinstance(result, RayError):
                    first, error = self._cause((call, result), pending)
                    raise self._failure(calls[first], error, method) from error
            yield from results.items()

    def check(self, method: str, started: float) -> None:
        """Check for failures and time limits in ``method`` while the driver waits for something other than workers."""
        self._supervisor.check(method, time.monotonic() - started)

    @staticmethod
    def _cause(failed: tuple[Any, RayError], pending: list[Any]) -> tuple[Any, RayError]:
        """Return a failed call and its error. If a connection broke, prefer the failure at the other end."""
        deadline = time.monotonic() + CAUSE_S
        while _broke_network(failed[1]) and pending and time.monotonic() < deadline:
            done, pending = ray.wait(pending, num_returns=1, timeout=POLL_S)
            others = [(call, error) for call in done if isinstance(error := _outcome(call), RayError)]
            failed = next((other for other in others if not _broke_network(other[1])), failed)
        return failed

    def _failure(self, rank: int, error: RayError, method: str) -> Exception:
        """Convert a worker's error to an exception for the caller."""
        report = str(error)
        cause = f"{report.strip().splitlines()[-1].strip():.300}"
        if isinstance(error, OutOfMemoryError):
            return self._supervisor.failure(
                rank, killed_for_memory_line(report, method, self.device_type), method, report
            )
        if not isinstance(error, RayTaskError):
            cause = next((meaning for part, meaning in DEATHS.items() if part in report), cause)
            return self._supervisor.failure(rank, f"died in {method}: {cause}", method, report)
        if isinstance(error.cause, ConfigError):
            return (OutOfMemory if isinstance(error.cause, OutOfMemory) else ConfigError)(str(error.cause))
        if _broke_network(error):
            return self._supervisor.failure(rank, f"lost its connection in {method}: {cause}", method, report)
        return WorkerError(f"{self._supervisor.name(rank)} failed in {method}:\n{error}")


def _outcome(call: Any) -> Any:
    try:
        return ray.get(call)
    except RayError as error:
        return error


def _broke_network(error: RayError) -> bool:
    return isinstance(error, RayTaskError) and isinstance(error.cause, NetworkError)


class Stored(NamedTuple):
    """Values yielded by a worker's method, sent directly between workers and kept while this object exists."""

    parts: list[Any]
    """References to objects in Ray's object store."""


class _Host:
    """Ray actor of a worker. It imports the worker class in ``start``, after the environment has been set.

    Each call returns the result together with the worker's peak memory, which avoids a separate call.
    """

    def prepare(
        self,
        rank: int,
        folder: str,
        secrets: dict[str, str],
        heartbeat: HeartbeatSettings,
        logs: Path | None,
        device_type: str,
    ) -> Identity:
        """Prepare the worker's process and return its identity.

        The process changes to the driver's working directory, so that relative paths work, and sets the secrets. It
        redirects its output to ``logs`` and exits if the driver is lost.
        """
        self.rank = rank
        restore_umask()
        if os.path.isdir(folder):
            os.chdir(folder)
        os.environ.update(secrets)
        if logs is not None:
            log_to(logs, rank)
        follow(heartbeat, rank)
        memory = torch.cuda.get_device_properties(0).total_memory if device_type == "cuda" else 0
        node, meeting_point = ray.get_runtime_context().get_node_id(), (ray.util.get_node_ip_address(), free_port())
        return Identity(node, socket.gethostname(), os.getpid(), memory, meeting_point)

    def start(self, worker: str, config: Any, place: WorkerPlace, arguments: tuple[Any, ...]) -> tuple[Any, MemoryPeak]:
        self.place, self.memory = place, PeakMemory(place.device_type)
        self.folder: Path | None = None
        set_stage("importing libraries")
        with self._naming_errors("start"), loading():
            self.worker = pkgutil.resolve_name(worker)(config, place, *arguments)
        name = torch.cuda.get_device_name() if place.device_type == "cuda" else ""
        return name, self.memory.read()

    def call(
        self, method: str, arguments: tuple[Any, ...], share: Any = None, sends: bool = True
    ) -> tuple[Any, MemoryPeak]:
        """Call the worker's method, with any ``share`` as the first argument. Return the result if ``sends``."""
        self.memory.reset()
        if share is not None:
            arguments = (share, *arguments)
        # Log calls so that the worker's log shows its current call, or the one in which it hung.
        print(f"{time.strftime('%X')} {method}", flush=True)
        self.folder = next((each for each in arguments if isinstance(each, Path)), self.folder)
        with record_function(method), self._naming_errors(method), naming_storage(self.folder):
            read = [map(ray.get, each.parts) if isinstance(each, Stored) else each for each in arguments]
            result = self._method(method)(*read)
            if isinstance(result, Iterator):
                result = Stored([ray.put(part) for part in result])
        print(f"{time.strftime('%X')} {method}: done", flush=True)
        return result if sends else None, self.memory.read()

    def _method(self, name: str) -> Callable[..., Any]:
        """Return a method of the worker or of one of its attributes, such as ``critic.update``."""
        holder, names = self.worker, name.split(".")
        for part in names[:-1]:
            holder = getattr(holder, part)
            if holder is None:
                raise RuntimeError(f"{name}: worker {self.rank} holds no {part}, by the options of the run")
        method: Callable[..., Any] = getattr(holder, names[-1])
        return method

    @contextmanager
    def _naming_errors(self, method: str) -> Iterator[None]:
        """Convert out-of-memory errors to a line with the worker, method and options, and wrap network errors."""
        try:
            yield
        except BaseException as error:
            if is_network_error(error):
                raise NetworkError(f"{type(error).__name__}: {error}") from error
            if not isinstance(error, Exception) or not is_out_of_memory(error):
                raise
            peak, device_type = self.memory.read().used, self.place.device_type
            raise OutOfMemory(out_of_memory_line(error, method, self.rank, peak, device_type)) from error

    def start_profile(self) -> None:
        self.profiler = profile()
        self.profiler.start()

    def stop_profile(self, path: Path) -> None:
        self.profiler.stop()
        path.parent.mkdir(parents=True, exist_ok=True)
        self.profiler.export_chrome_trace(str(path))
        del self.profiler
