"""A group of equal workers, each a Ray actor, that are called together."""

import os
import pkgutil
import random
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import ray
import torch
from ray.exceptions import RayActorError, RayTaskError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from tensordict import TensorDictBase, is_tensorclass
from torch.profiler import record_function

from verl.config.errors import ConfigError
from verl.single_controller.out_of_memory import is_out_of_memory, out_of_memory_line
from verl.single_controller.profiling import MemoryPeak, PeakMemory, WorkerProfiler
from verl.utils.distributed import WorkerPlace

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def cpu_threads(workers_per_node: int) -> int:
    """Threads of each worker: the value of OMP_NUM_THREADS, or its share of the machine's cores."""
    # OpenMP allows a list; its first number is for the outermost level.
    wanted = os.environ.get(THREAD_VARIABLES[0], "").split(",")[0]
    return int(wanted) if wanted.isdecimal() else max(1, (os.cpu_count() or 1) // workers_per_node)


class WorkerError(RuntimeError):
    """A worker raised or died; the message says which, where and why."""


class WorkerGroup:
    """Spawns ``world_size`` workers and runs their methods on all of them at once.

    Args:
        worker: the worker's class as ``module:name``, called as ``cls(config, place, *arguments)`` in each process. It
            is a string so that only the workers import what it needs.
        nnodes: machines.
        workers_per_node: workers on each machine, one per GPU or that many CPU processes.
        device_type: ``cpu`` or ``cuda``.
        environment: environment variables of the workers, set before they import anything.

    On a CPU each worker computes with :func:`cpu_threads` threads.
    """

    def __init__(
        self,
        worker: str,
        config: Any,
        arguments: tuple[Any, ...],
        nnodes: int,
        workers_per_node: int,
        device_type: str,
        environment: dict[str, str],
    ) -> None:
        self.workers_per_node = workers_per_node
        self.world_size = nnodes * workers_per_node
        resource = "GPU" if device_type == "cuda" else "CPU"
        per_node = float(workers_per_node)
        bundle = {"CPU": per_node} | ({"GPU": per_node} if device_type == "cuda" else {})
        # One bundle per machine, ranks in machine order: neighbours in rank share a machine.
        strategy = "STRICT_SPREAD" if nnodes > 1 else "PACK"
        self._placement = placement_group([dict(bundle) for _ in range(nnodes)], strategy=strategy)
        if not self._placement.wait(timeout_seconds=60):
            remove_placement_group(self._placement)
            raise WorkerError(
                f"{nnodes} machines with {workers_per_node} free {resource}s each are needed; the Ray cluster has "
                f"{ray.cluster_resources().get(resource, 0):g} in all. Lower trainer.n_gpus_per_node or trainer.nnodes"
            )
        threads = cpu_threads(workers_per_node)
        thread_environment = dict.fromkeys(THREAD_VARIABLES, str(threads))
        actor_class: Any = ray.remote(_Host)
        self._workers: list[Any] = [
            actor_class.options(
                num_cpus=1,
                num_gpus=1 if device_type == "cuda" else 0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._placement, rank // workers_per_node),
                runtime_env={"env_vars": thread_environment | environment},
            ).remote()
            for rank in range(self.world_size)
        ]
        self._peak: MemoryPeak | None = None
        try:
            self.device_name = self._start(worker, config, arguments, device_type, threads)
        except BaseException:
            # The other workers may wait for the one that failed, and would keep their share of the machine.
            self.close()
            raise

    def _start(self, worker: str, config: Any, arguments: tuple[Any, ...], device_type: str, threads: int) -> str:
        """Make the workers; returns the name of worker 0's GPU, empty on a CPU."""
        ((address, port),) = self._wait([self._workers[0].meeting_point.remote()], "start")
        places = [
            WorkerPlace(rank, self.world_size, address, port, device_type, threads, self.workers_per_node)
            for rank in range(self.world_size)
        ]
        calls = [
            host.start.remote(worker, config, place, arguments)
            for host, place in zip(self._workers, places, strict=True)
        ]
        name: str = self._gather(calls, "start")[0]
        return name

    def run(self, method: str, *arguments: Any) -> list[Any]:
        """Call ``method`` with the same arguments on every worker; returns the results in rank order.

        Raises:
            WorkerError: if a worker raises or dies.
        """
        return self._gather([worker.call.remote(method, arguments) for worker in self._workers], method)

    def run_split(self, method: str, batch: Any, *arguments: Any, copies: int = 1) -> list[Any]:
        """As ``run``, with ``batch`` (a tensorclass) cut into one contiguous share per worker, in rank order.

        Shares differ by at most one row. A batch with fewer rows than shares is refused: an idle rank would hang the
        others. ``copies`` neighbouring workers work on the same share together; the first one's result counts.
        """
        size, num_shares = len(batch), self.world_size // copies
        if size < num_shares:
            raise ValueError(f"{method}: a batch of {size} cannot be split over {num_shares} workers")
        bounds = [size * share // num_shares for share in range(num_shares + 1)]
        shares = [batch[start:stop].clone() for start, stop in zip(bounds, bounds[1:], strict=False)]
        calls = [
            worker.call.remote(method, (shares[rank // copies], *arguments))
            for rank, worker in enumerate(self._workers)
        ]
        return self._gather(calls, method)[::copies]

    def take_peak_memory(self) -> MemoryPeak | None:
        """The most memory that any worker used since the last call of this method; None if none was called."""
        peak, self._peak = self._peak, None
        return peak

    def start_profile(self) -> None:
        """Start torch's profiler in every worker."""
        self._wait([worker.start_profile.remote() for worker in self._workers], "start_profile")

    def stop_profile(self, paths: list[Path]) -> None:
        """Stop it and write one trace per worker, each on the worker's own machine."""
        calls = [worker.stop_profile.remote(path) for worker, path in zip(self._workers, paths, strict=True)]
        self._wait(calls, "stop_profile")

    def close(self) -> None:
        """Stop the workers."""
        for worker in self._workers:
            ray.kill(worker)
        remove_placement_group(self._placement)

    def _gather(self, calls: list[Any], method: str) -> list[Any]:
        """The results of the calls; the peak memory they report is kept for ``take_peak_memory``."""
        replies: list[_Reply] = self._wait(calls, method)
        for reply in replies:
            self._peak = reply.peak.joined(self._peak)
        return [reply.result for reply in replies]

    @staticmethod
    def _wait(calls: list[Any], method: str) -> list[Any]:
        """Wait for all calls; raise at the first failure, since the others may wait for that worker for ever."""
        ranks = {call: rank for rank, call in enumerate(calls)}
        pending = list(calls)
        while pending:
            done, pending = ray.wait(pending, num_returns=1)
            try:
                ray.get(done[0])
            except RayTaskError as error:
                if isinstance(error.cause, ConfigError):
                    raise ConfigError(str(error.cause)) from error
                raise WorkerError(f"worker {ranks[done[0]]} failed in {method}:\n{error}") from error
            except RayActorError as error:
                raise WorkerError(f"worker {ranks[done[0]]} died in {method}: {error}") from error
        return ray.get(calls)


def concat(batches: list[Any]) -> Any:
    """Join the shares that ``run_split`` returned: tensors, tensorclasses, or tuples of them."""
    first = batches[0]
    if isinstance(first, tuple):
        return tuple(concat(list(column)) for column in zip(*batches, strict=True))
    assert isinstance(first, torch.Tensor | TensorDictBase) or is_tensorclass(first), type(first)
    return torch.cat(batches, dim=0)


class _Reply(NamedTuple):
    """A call's result and its peak memory, which travels along so that it costs no further call."""

    result: Any
    peak: MemoryPeak


class _Host:
    """The Ray actor. It imports the worker only in ``start``, after the environment is set."""

    def meeting_point(self) -> tuple[str, int]:
        """An address of this machine and a port that is free there now."""
        # Below the ephemeral ports, so that no outgoing connection takes it before the workers do.
        ports = random.SystemRandom().sample(range(20000, 30000), k=100)
        for port in ports:
            with socket.socket() as listener:
                try:
                    listener.bind(("", port))
                except OSError:
                    continue
            return ray.util.get_node_ip_address(), port
        raise OSError(f"none of a hundred ports from {min(ports)} to {max(ports)} is free on this machine")

    def start(self, worker: str, config: Any, place: WorkerPlace, arguments: tuple[Any, ...]) -> _Reply:
        self.place, self.profiler = place, WorkerProfiler()
        self.memory = PeakMemory(place.device_type)
        with self._naming_memory("start"):
            self.worker = pkgutil.resolve_name(worker)(config, place, *arguments)
        name = torch.cuda.get_device_name() if place.device_type == "cuda" else ""
        return _Reply(name, self.memory.read())

    def call(self, method: str, arguments: tuple[Any, ...]) -> _Reply:
        self.memory.reset()
        with record_function(method), self._naming_memory(method):
            result = getattr(self.worker, method)(*arguments)
        return _Reply(result, self.memory.read())

    @contextmanager
    def _naming_memory(self, method: str) -> Iterator[None]:
        """If memory runs out within, say in one line where and what needs less."""
        try:
            yield
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            peak, place = self.memory.read(), self.place
            raise ConfigError(out_of_memory_line(error, method, place.rank, peak, place.device_type)) from error

    def start_profile(self) -> None:
        self.profiler.start()

    def stop_profile(self, path: Path) -> None:
        self.profiler.stop(path)
