"""Heartbeats between the driver and its workers, over a separate connection.

Ray's health checks take a minute by default to declare a silent machine dead, are set where the cluster is started, see
machines and not stopped processes, and let workers that lost their driver run on. Measured at ``detection_s`` = 6, with
Ray's settings as in docs/multinode.md: a driver notices a cut network after 8 s (14 s by Ray alone), and the workers on
the other side exit after 8 s (140 s by Ray alone). Here both sides know within ``detection_s``: the driver ends the
attempt, and a worker exits.
"""

import hmac
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from verl.cluster.environment import REQUEUE
from verl.utils.distributed import listening_socket
from verl.utils.process import Stage

TOKEN_BYTES = 32
LAST_RESORT_S = 45.0
"""Seconds after which the kernel ends a worker that should have ended itself."""


class HeartbeatSettings(NamedTuple):
    """How a worker connects to its driver."""

    address: tuple[str, int]
    token: bytes
    detection_s: float


def interval(detection_s: float) -> float:
    """Return the seconds between two beats: several may be lost or late."""
    return min(1.0, detection_s / 5)


def _beats(
    connection: socket.socket, detection_s: float, hear: Callable[[bytes], None] = lambda beats: None
) -> Iterator[float]:
    """Exchange beats until the other side hangs up; yields the seconds of its silence again and again.

    A beat is a line with the :class:`Stage` of the process that sends it; ``hear`` gets them.

    Raises:
        OSError: the connection broke.
    """
    every = interval(detection_s)
    connection.settimeout(every)
    heard = last = time.monotonic()
    while True:
        with suppress(TimeoutError):
            beats = connection.recv(4096)
            if not beats:
                return
            hear(beats)
            heard = time.monotonic()
            time.sleep(every / 2)
        # A full buffer means that the other side does not read; its silence is noticed anyway.
        with suppress(TimeoutError):
            connection.send(f"{Stage.name}\n".encode())
        now = time.monotonic()
        if now - last > detection_s / 2:
            heard += now - last  # this process was paused, and could hear nobody
        last = now
        yield now - heard


class Heartbeat:
    """The driver's side: a thread that accepts the workers, and one that listens to each.

    Args:
        host: the address of this machine that the workers can reach.
    """

    def __init__(self, host: str, detection_s: float) -> None:
        self._listener = listening_socket(host, 0)
        address, token = (host, self._listener.getsockname()[1]), secrets.token_bytes(TOKEN_BYTES)
        self.settings = HeartbeatSettings(address, token, detection_s)
        self._connections: set[socket.socket] = set()
        self._silent: dict[int, float] = {}
        self._closed: dict[int, float] = {}
        self.stages: dict[int, str] = {}
        """What each worker said last that it is doing."""
        threading.Thread(target=self._accept, name="heartbeat", daemon=True).start()

    def lost(self) -> dict[int, str]:
        """Rank -> what happened, for workers that connected and are silent or gone now."""
        now, limit_s, closed = time.monotonic(), self.settings.detection_s, self._closed.copy()
        silent = {
            rank: f"silent for {seconds:.0f} s"
            for rank, seconds in self._silent.copy().items()
            if seconds > limit_s and rank not in closed
        }
        # Ray reports why a process died, but takes a few seconds.
        return silent | {rank: "ended" for rank, since in closed.items() if now - since > min(5.0, limit_s)}

    def close(self) -> None:
        """Hang up; workers that still run exit."""
        # A thread that waits for one of them wakes up.
        for each in (self._listener, *self._connections.copy()):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with self._listener, suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self._connections.add(connection)
                threading.Thread(target=self._listen, args=(connection,), name="heartbeat", daemon=True).start()

    def _listen(self, connection: socket.socket) -> None:
        """Hear a worker, which sends the token and its rank first, until it is gone."""
        rank = None
        with connection, suppress(OSError):
            connection.settimeout(self.settings.detection_s)
            with connection.makefile("rb") as hello:
                token, number = hello.read(TOKEN_BYTES), hello.read(4)
            if len(number) == 4 and hmac.compare_digest(token, self.settings.token):
                rank = int.from_bytes(number, "big")
                self._closed.pop(rank, None)  # it takes the place of one that was lost
                for seconds in _beats(connection, self.settings.detection_s, partial(self._hear, rank)):
                    self._silent[rank] = seconds
        self._connections.discard(connection)
        if rank is not None:
            self._closed[rank] = time.monotonic()

    def _hear(self, rank: int, beats: bytes) -> None:
        """Take the last whole line of what a worker sent."""
        *_, last, _ = ("\n" + beats.decode(errors="replace")).split("\n")
        if last:
            self.stages[rank] = last


def follow(settings: HeartbeatSettings, rank: int) -> None:
    """Connect from a worker, and start a thread that ends this process once the driver is gone.

    Raises:
        OSError: the driver cannot be reached.
    """
    connection = socket.create_connection(settings.address, timeout=settings.detection_s)
    connection.sendall(settings.token + rank.to_bytes(4, "big"))
    _set_alarm(settings.detection_s)
    threading.Thread(target=_follow, args=(connection, settings.detection_s), name="heartbeat", daemon=True).start()


def _set_alarm(detection_s: float) -> None:
    """Have the kernel end the process if the thread cannot run.

    Another thread may hold the interpreter's lock, or the process may be stopped. A process that was stopped first has
    time to write its stacks.
    """
    signal.setitimer(signal.ITIMER_REAL, detection_s + LAST_RESORT_S)


def _follow(connection: socket.socket, detection_s: float) -> None:
    reason = "has ended"
    try:
        for seconds in _beats(connection, detection_s):
            _set_alarm(detection_s)
            if seconds > detection_s:
                reason = f"was silent for {seconds:.0f} s"
                break
    except OSError as error:
        reason = f"is gone ({error})"
    print(f"this worker exits: its driver {reason}", file=sys.stderr, flush=True)
    os._exit(REQUEUE)
