"""Supervision of a worker group while the driver waits: heartbeats, time limits, Ray's head; and workers' stacks."""

import faulthandler
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import ray

from verl.single_controller.failures import HeadLost, MachineError
from verl.single_controller.heartbeat import Heartbeat, interval
from verl.single_controller.machines import run_on

HEAD_S = 3.0
"""Seconds that Ray's head may take to accept a connection."""

STACKS_SIGNAL = signal.SIGUSR2
"""At this signal a worker writes the stacks of its threads."""


@dataclass(frozen=True)
class Supervision:
    """Options of the supervision of a worker group."""

    detection_s: float = 60.0
    """Seconds of silence after which a worker, the driver or Ray's head counts as lost."""
    phase_timeout_s: float = 0.0
    """Most seconds that one call of the workers may take; 0: no limit."""
    collective_timeout_s: float | None = None
    """Time limit of collective operations; None: that of torch."""
    logs: Path | None = None
    """Folder of the workers' logs and stacks; None: Ray's own."""
    interrupt: Callable[[], None] = lambda: None
    """Called about once a second while the driver waits for workers; what it raises ends the wait."""


class Identity(NamedTuple):
    """The process of a worker."""

    node_id: str
    host: str
    pid: int

    @classmethod
    def of_this_process(cls) -> "Identity":
        return cls(ray.get_runtime_context().get_node_id(), socket.gethostname(), os.getpid())


class Supervisor:
    """Watches the workers of one group from the driver."""

    def __init__(self, options: Supervision) -> None:
        self.options = options
        self.identities: list[Identity] = []
        """By rank, once the workers have reported them."""
        self.heartbeat = Heartbeat(ray.util.get_node_ip_address(), options.detection_s)
        self._head = _HeadWatch(ray.get_runtime_context().gcs_address, options.detection_s)

    def name(self, rank: int) -> str:
        """The name of a worker in messages."""
        on = f" on {self.identities[rank].host}" if rank < len(self.identities) else ""
        return f"worker {rank}{on}"

    def check(self, method: str, seconds: float) -> None:
        """Called about once a second during a call of the workers that has lasted ``seconds`` so far.

        Raises:
            MachineError: workers are silent, or the call takes too long.
            HeadLost: Ray's head is gone.
        """
        self.options.interrupt()
        if silent := self._head.silent():
            raise HeadLost(f"Ray's head at {self._head.address} has not answered for {silent:.0f} s")
        if lost := self.heartbeat.lost():
            (rank, what), *_ = lost.items()
            raise self.failure(rank, what, method)
        limit = self.options.phase_timeout_s
        if limit and seconds > limit:
            reason = f"{method} has taken longer than trainer.phase_timeout_s={limit:g}"
            answered = self._write_stacks()
            raise MachineError(reason + self._pointer(), f"{method} hangs" if answered else "")

    def failure(self, rank: int, what: str, method: str, details: str = "") -> MachineError:
        """The error of a worker that was lost; the others, which may wait for it for ever, write their stacks."""
        if not self._head.answers():
            return HeadLost(f"{self.name(rank)} {what} in {method}: Ray's head at {self._head.address} is gone")
        answered = self._write_stacks()
        lives = rank < len(self.identities) and self.identities[rank].node_id in answered
        message = f"{self.name(rank)} {what} in {method}{details}{self._pointer(rank)}"
        return MachineError(message, f"worker {rank} in {method}" if lives else "")

    def close(self) -> None:
        """Workers that still run exit."""
        self.heartbeat.close()
        self._head.close()
        if self.options.logs is not None:
            for path in self.options.logs.glob("*.stacks"):
                with suppress(OSError):
                    if path.stat().st_size == 0:
                        path.unlink()

    def _pointer(self, rank: int | None = None) -> str:
        if self.options.logs is None:
            return ""
        name = "" if rank is None else f"/{log_name(rank)}"
        return (
            f"; its log is {self.options.logs}{name}" if name else f"; the workers' stacks are in {self.options.logs}"
        )

    def _write_stacks(self) -> set[str]:
        """Have all workers write their stacks, stopped ones too; the nodes that did."""
        by_node: dict[str, list[int]] = {}
        for identity in self.identities:
            by_node.setdefault(identity.node_id, []).append(identity.pid)
        calls = {node: (pids,) for node, pids in by_node.items()}
        with suppress(ray.exceptions.RayError):
            return set(run_on(calls, _signal_workers))
        return set()


def log_name(rank: int) -> str:
    """The file of a worker's output."""
    return f"rank_{rank}.log"


def log_to(folder: Path, rank: int) -> None:
    """Redirect the output of this process to a file of ``folder``, and its stacks to another."""
    folder.mkdir(parents=True, exist_ok=True)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    log = os.open(folder / log_name(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    host = socket.gethostname()
    print(f"worker {rank} on {host}, process {os.getpid()}", flush=True)
    stacks = (folder / f"rank_{rank}.stacks").open("w")
    # It runs in the signal's handler, whatever the interpreter is busy with.
    faulthandler.register(STACKS_SIGNAL, stacks, all_threads=True, chain=False)
    _KEPT_OPEN.append(stacks)


_KEPT_OPEN: list[Any] = []


def _signal_workers(pids: Sequence[int]) -> None:
    """Runs on the workers' machine."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, STACKS_SIGNAL)
            # A stopped process takes the signal only when it goes on.
            os.kill(pid, signal.SIGCONT)
    time.sleep(0.5)  # for the stacks to reach the disk before the workers are killed


class _HeadWatch:
    """Connects to Ray's head again and again: Ray ends a driver that has lost it, which then could not say so."""

    def __init__(self, address: str, detection_s: float) -> None:
        self.address = address
        self._detection_s = detection_s
        self._answered = time.monotonic()
        self._stopped = threading.Event()
        threading.Thread(target=self._watch, name="head", daemon=True).start()

    def silent(self) -> float:
        """Seconds for which it has not answered, if they are too many; otherwise 0."""
        seconds = time.monotonic() - self._answered
        return seconds if seconds > self._detection_s else 0.0

    def answers(self) -> bool:
        """Whether it answers now."""
        try:
            self._connect(HEAD_S)
        except OSError:
            return False
        return True

    def close(self) -> None:
        self._stopped.set()

    def _connect(self, timeout_s: float) -> None:
        host, _, port = self.address.rpartition(":")
        socket.create_connection((host, int(port)), timeout=timeout_s).close()

    def _watch(self) -> None:
        every = interval(self._detection_s)
        last = time.monotonic()
        while not self._stopped.wait(every):
            now = time.monotonic()
            if (pause := now - last) > self._detection_s / 2:
                self._answered += pause  # this process was paused
            with suppress(OSError):
                self._connect(every)
                self._answered = time.monotonic()
            last = time.monotonic()
