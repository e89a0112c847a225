"""Heartbeats between the driver and its workers over a dedicated connection.

By default, Ray's health checks take a minute to declare a silent machine dead, and do not notice stopped processes.
They are configured when the cluster starts. Workers that lose their driver keep running. With heartbeats, both sides
react within ``detection_s``: the driver ends the attempt, and the worker exits. With ``detection_s`` = 6 and the Ray
settings in docs/multinode.md, drivers notice a broken network after 8 s instead of 14 s, and disconnected workers exit
after 8 s instead of 140 s.
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
"""Grace period in seconds, after which the kernel kills a worker that failed to exit."""


class HeartbeatSettings(NamedTuple):
    """Settings for a worker's connection to its driver."""

    address: tuple[str, int]
    token: bytes
    detection_s: float


def interval(detection_s: float) -> float:
    """Return a heartbeat interval in seconds that tolerates several lost or late heartbeats."""
    return min(1.0, detection_s / 5)


def _beats(
    connection: socket.socket, detection_s: float, hear: Callable[[bytes], None] = lambda beats: None
) -> Iterator[float]:
    """Exchange heartbeats until the connection closes, yielding the seconds since the last received heartbeat.

    A heartbeat is a line with the :class:`Stage` of the sending process. ``hear`` receives the raw bytes. Raises
    ``OSError`` if the connection breaks.
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
        # A full buffer means that the other side is not reading; its silence is detected anyway.
        with suppress(TimeoutError):
            connection.send(f"{Stage.name}\n".encode())
        now = time.monotonic()
        if now - last > detection_s / 2:
            heard += now - last  # this process was paused and could not receive anything
        last = now
        yield now - heard


class Heartbeat:
    """Heartbeat server in the driver, with one thread that accepts workers and one listener thread per worker.

    Args:
        host: Address of this machine that the workers can reach.
    """

    def __init__(self, host: str, detection_s: float) -> None:
        self._listener = listening_socket(host, 0)
        address, token = (host, self._listener.getsockname()[1]), secrets.token_bytes(TOKEN_BYTES)
        self.settings = HeartbeatSettings(address, token, detection_s)
        self._connections: set[socket.socket] = set()
        self._silent: dict[int, float] = {}
        self._closed: dict[int, float] = {}
        self.stages: dict[int, str] = {}
        """Latest stage reported by each worker, by rank."""
        threading.Thread(target=self._accept, name="heartbeat", daemon=True).start()

    def lost(self, grace_s: float = 0.0) -> dict[int, str]:
        """Return the ranks of connected workers that have become silent or exited, each with the reason.

        Workers may be silent for ``grace_s`` seconds longer than ``detection_s``.
        """
        now, limit_s, closed = time.monotonic(), self.settings.detection_s, self._closed.copy()
        silent = {
            rank: f"silent for {seconds:.0f} s"
            for rank, seconds in self._silent.copy().items()
            if seconds > limit_s + grace_s and rank not in closed
        }
        # Ray reports why a process died, but takes a few seconds to do so.
        return silent | {rank: "ended" for rank, since in closed.items() if now - since > min(5.0, limit_s)}

    def close(self) -> None:
        """Close all connections, which makes running workers exit."""
        # Shutting a socket down wakes up the thread that waits for it.
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
        """Listen to a worker until it disconnects. The first message contains the token and the worker's rank."""
        rank = None
        with connection, suppress(OSError):
            connection.settimeout(self.settings.detection_s)
            with connection.makefile("rb") as hello:
                token, number = hello.read(TOKEN_BYTES), hello.read(4)
            if len(number) == 4 and hmac.compare_digest(token, self.settings.token):
                rank = int.from_bytes(number, "big")
                self._closed.pop(rank, None)  # it may replace a lost worker
                for seconds in _beats(connection, self.settings.detection_s, partial(self._hear, rank)):
                    self._silent[rank] = seconds
        self._connections.discard(connection)
        if rank is not None:
            self._closed[rank] = time.monotonic()

    def _hear(self, rank: int, beats: bytes) -> None:
        """Record the last complete line of the received heartbeats."""
        *_, last, _ = ("\n" + beats.decode(errors="replace")).split("\n")
        if last:
            self.stages[rank] = last


def follow(settings: HeartbeatSettings, rank: int) -> None:
    """Connect this worker to the driver, and start a thread that exits the process if the driver is lost.

    Raises ``OSError`` if the driver cannot be reached.
    """
    connection = socket.create_connection(settings.address, timeout=settings.detection_s)
    connection.sendall(settings.token + rank.to_bytes(4, "big"))
    _set_alarm(settings.detection_s)
    threading.Thread(target=_follow, args=(connection, settings.detection_s), name="heartbeat", daemon=True).start()


def _set_alarm(detection_s: float) -> None:
    """Make the kernel kill the process if the heartbeat thread cannot run.

    The kernel kills the process if another thread holds the interpreter lock or the process is stopped. The delay
    leaves stopped processes enough time to write their stacks.
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
