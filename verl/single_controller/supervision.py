"""Supervises a worker group with heartbeats, time limits, checks of Ray's head, and stack traces of workers."""

import errno
import faulthandler
import os
import signal
import socket
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import ray

from verl.cluster.failures import HeadLost, MachineError
from verl.cluster.machines import run_on
from verl.cluster.network import reachable
from verl.single_controller.heartbeat import LAST_RESORT_S, Heartbeat, interval
from verl.utils.files import print_to

HEAD_S = 3.0
"""Timeout in seconds for connecting to Ray's head."""

START = "start"
"""Name of the call that starts the workers."""

STACKS_SIGNAL = signal.SIGUSR2
"""Signal that makes a worker write the stacks of all its threads."""


@dataclass(frozen=True)
class Supervision:
    """Options for supervising a worker group."""

    detection_s: float = 60.0
    """Seconds of silence after which a worker, the driver or Ray's head is considered lost."""
    phase_timeout_s: float = 0.0
    """Maximum seconds for a single call to the workers, or 0 for no limit."""
    collective_timeout_s: float | None = None
    """Timeout of collective operations in seconds, or None for torch's default."""
    logs: Path | None = None
    """Folder for the workers' logs and stacks, or None to use Ray's logs."""
    kind: str = "worker"
    """Name of this kind of worker in messages."""
    say_stage: Callable[[str], None] = lambda stage: None
    """Callback that receives each startup stage when the first worker reaches it."""
    interrupt: Callable[[], None] = lambda: None
    """Callback that runs about once a second while the driver waits for workers. An exception ends the wait."""


class Identity(NamedTuple):
    """Information that a worker's process reports before the worker starts."""

    node_id: str
    host: str
    pid: int
    device_memory: int
    """Memory of the worker's GPU in bytes, or 0 on a CPU."""
    meeting_point: tuple[str, int]
    """Address of the worker's machine, and a port on it that is currently free."""


class Supervisor:
    """Driver-side monitor of a group of workers."""

    def __init__(self, options: Supervision) -> None:
        self.options = options
        self.identities: list[Identity] = []
        """Identities of the workers by rank, available once all workers have reported them."""
        self.left_out: set[int] = set()
        """Ranks of workers that are no longer monitored."""
        self.heartbeat = Heartbeat(ray.util.get_node_ip_address(), options.detection_s)
        self._head = ray.get_runtime_context().gcs_address
        self._looked = time.monotonic()
        self._stages_said: list[str] = []
        self._head_silent = 0.0

    def name(self, rank: int) -> str:
        on = f" on {self.identities[rank].host}" if rank < len(self.identities) else ""
        return f"{self.options.kind} {rank}{on}"

    def check(self, method: str, seconds: float) -> None:
        """Check the workers. ``seconds`` is the duration of the call in progress, during which checks run every second.

        Raises:
            MachineError: If a worker is silent or the call exceeds its time limit.
            HeadLost: If Ray's head is gone.
        """
        self.options.interrupt()
        self._say_stages()
        self._look_for_head()
        # A worker that loads libraries or compiles kernels may hold the interpreter lock and send no heartbeats. If it
        # never releases the lock, the kernel kills it after this grace period.
        lost = self.heartbeat.lost(LAST_RESORT_S if method == START else 0.0)
        if watched := [rank for rank in lost if rank not in self.left_out]:
            rank, what = watched[0], lost[watched[0]]
            raise self.failure(rank, f"{what} in {method}", method)
        limit = self.options.phase_timeout_s
        if limit and seconds > limit:
            stacks = f"; the workers' stacks are in {self.options.logs}" if self.options.logs else ""
            message = f"{method} has taken longer than trainer.phase_timeout_s={limit:g}{stacks}"
            raise MachineError(message, f"{method} hangs" if self._write_stacks() else "")

    def _say_stages(self) -> None:
        for stage in self.heartbeat.stages.copy().values():
            if stage not in self._stages_said:
                self._stages_said.append(stage)
                workers = len(self.identities) or len(self.heartbeat.stages)
                self.options.say_stage(f"{stage} on {workers} {self.options.kind}{'s' * (workers > 1)}")

    def head_answers(self) -> bool:
        """Return whether Ray's head accepts a connection."""
        return reachable(self._head, HEAD_S)

    def failure(self, rank: int, what: str, method: str, report: str = "") -> MachineError:
        """Return the error for a worker lost in ``method``, and make the other workers write their stacks.

        The other workers may hang while they wait for the lost worker. ``report`` is Ray's multi-line message about the
        failure, which is appended to the worker's log.
        """
        if not self.head_answers():
            return HeadLost(f"{self.name(rank)} {what}: Ray's head at {self._head} is gone")
        if not local_ray_answers():
            return HeadLost(f"{self.name(rank)} {what}: Ray's processes on this machine (raylet) are gone")
        answered = self._write_stacks()
        lives = rank < len(self.identities) and self.identities[rank].node_id in answered
        message = f"{self.name(rank)} {what}"
        if self.options.logs:
            log = self.options.logs / f"rank_{rank}.log"
            with suppress(OSError), log.open("a") as file:
                file.write(f"{report}\n")
            message += f"; its log is {log}"
        return MachineError(message, f"{self.options.kind} {rank} in {method}" if lives else "", rank)

    def _look_for_head(self) -> None:
        """Raise ``HeadLost`` if Ray's head does not respond, before Ray kills this process without a message."""
        every, since = interval(self.options.detection_s), time.monotonic() - self._looked
        if since < every:
            return
        self._looked += since
        # After a long gap between two checks, count only part of it as silence of the head.
        self._head_silent = 0.0 if reachable(self._head, every) else self._head_silent + min(since, 3 * every)
        if self._head_silent > self.options.detection_s:
            raise HeadLost(f"Ray's head at {self._head} has not answered for {self._head_silent:.0f} s")

    def close(self) -> None:
        """Make running workers exit, and remove empty stack files."""
        self.heartbeat.close()
        if self.options.logs is not None:
            for path in self.options.logs.glob("*.stacks"):
                with suppress(OSError):
                    if path.stat().st_size == 0:
                        path.unlink()

    def _write_stacks(self) -> set[str]:
        """Make all workers, including stopped ones, write their stacks, and return the ids of nodes that responded."""
        by_node: dict[str, list[int]] = defaultdict(list)
        for identity in self.identities:
            by_node[identity.node_id].append(identity.pid)
        with suppress(ray.exceptions.RayError):
            return set(run_on({node: (pids,) for node, pids in by_node.items()}, _signal_workers))
        return set()


def local_ray_answers() -> bool:
    """Return whether Ray's process on this machine, the raylet, accepts a connection.

    Ray's head can outlive the raylet, and takes half a minute to notice the loss.
    """
    node: Any = ray._private.worker._global_node
    if node is None:
        return True
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(HEAD_S)
        return connection.connect_ex(node.raylet_socket_name) not in (errno.ECONNREFUSED, errno.ENOENT)


def log_to(folder: Path, rank: int) -> None:
    """Redirect the output of this process to a file in ``folder``, and its stacks to another file."""
    folder.mkdir(parents=True, exist_ok=True)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    print_to(folder / f"rank_{rank}.log", 1, 2)
    print(f"worker {rank} on {socket.gethostname()}, process {os.getpid()}", flush=True)
    stacks = os.open(folder / f"rank_{rank}.stacks", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    # Stacks are written in the C signal handler, so this works even if the interpreter is busy.
    faulthandler.register(STACKS_SIGNAL, stacks, all_threads=True, chain=False)


def _signal_workers(pids: Sequence[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, STACKS_SIGNAL)
            # A stopped process handles the signal only after it resumes.
            os.kill(pid, signal.SIGCONT)
    time.sleep(0.5)  # give the stacks time to reach the disk before the workers are killed
