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
import selectors
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from typing import NamedTuple

from verl.single_controller.scheduler import REQUEUE
from verl.utils.distributed import listening_socket

TOKEN_BYTES = 32
HELLO_BYTES = TOKEN_BYTES + 4
BEAT = b"."
LAST_RESORT_S = 45.0
"""Seconds after which the kernel ends a worker that should have ended itself."""


class Pulse(NamedTuple):
    """The driver's address and token, by which a worker connects to it."""

    address: tuple[str, int]
    token: bytes
    detection_s: float


def interval(detection_s: float) -> float:
    """Seconds between two signs of life: several may be lost or late."""
    return min(1.0, detection_s / 5)


class Heartbeat:
    """The driver's side: a thread that accepts the workers and receives their beats.

    Args:
        host: the address of this machine that the workers can reach.
    """

    def __init__(self, host: str, detection_s: float) -> None:
        self._detection_s = detection_s
        self._listener = listening_socket(host, 0)
        self._listener.setblocking(False)
        self.pulse = Pulse((host, self._listener.getsockname()[1]), secrets.token_bytes(TOKEN_BYTES), detection_s)
        self._heard: dict[int, float] = {}
        self._closed: dict[int, float] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="heartbeat", daemon=True)
        self._thread.start()

    def lost(self) -> dict[int, str]:
        """Rank -> what happened, for workers that connected and are silent or gone now."""
        now = time.monotonic()
        silent = {
            rank: f"silent for {now - last:.0f} s"
            for rank, last in self._heard.copy().items()
            if now - last > self._detection_s and rank not in self._closed
        }
        # Ray reports why a process died, but takes a few seconds.
        closed = self._closed.copy().items()
        return silent | {rank: "ended" for rank, since in closed if now - since > min(5.0, self._detection_s)}

    def close(self) -> None:
        """Hang up; workers that still run exit."""
        self._stopped.set()
        self._thread.join()

    def _listen(self) -> None:
        every = interval(self._detection_s)
        with selectors.DefaultSelector() as selector, self._listener:
            selector.register(self._listener, selectors.EVENT_READ)
            last = time.monotonic()
            while not self._stopped.is_set():
                for key, _ in selector.select(every / 2):
                    if key.fileobj is self._listener:
                        with suppress(OSError):
                            connection, _address = self._listener.accept()
                            connection.setblocking(False)
                            selector.register(connection, selectors.EVENT_READ, _Caller())
                    else:
                        self._receive(selector, key)
                now = time.monotonic()
                # While this process was paused it could hear nobody.
                if (pause := now - last) > self._detection_s / 2:
                    self._heard = {rank: heard + pause for rank, heard in self._heard.items()}
                last = now
                self._beat(selector, now)
            for key in list(selector.get_map().values()):
                if key.fileobj is not self._listener:
                    key.fileobj.close()  # type: ignore[union-attr]  # sockets alone were registered

    def _receive(self, selector: selectors.BaseSelector, key: selectors.SelectorKey) -> None:
        connection, caller = key.fileobj, key.data
        assert isinstance(connection, socket.socket)
        try:
            received = connection.recv(4096)
        except OSError:
            received = b""
        if not received:
            selector.unregister(connection)
            connection.close()
            if caller.rank is not None:
                self._closed[caller.rank] = time.monotonic()
            return
        if caller.rank is None:
            caller.hello += received
            if len(caller.hello) >= HELLO_BYTES:
                token, rank = caller.hello[:TOKEN_BYTES], caller.hello[TOKEN_BYTES:HELLO_BYTES]
                if not hmac.compare_digest(token, self.pulse.token):
                    selector.unregister(connection)
                    connection.close()
                    return
                caller.rank = int.from_bytes(rank, "big")
        if caller.rank is not None:
            self._heard[caller.rank] = time.monotonic()

    def _beat(self, selector: selectors.BaseSelector, now: float) -> None:
        for key in list(selector.get_map().values()):
            if isinstance(key.data, _Caller) and key.data.rank is not None and now >= key.data.next_beat:
                key.data.next_beat = now + interval(self._detection_s)
                # A full buffer means that the worker does not read; its silence is noticed anyway.
                with suppress(OSError):
                    key.fileobj.send(BEAT)  # type: ignore[union-attr]


class _Caller:
    """One connection; its rank is known once it has sent the token and the rank."""

    def __init__(self) -> None:
        self.hello = b""
        self.rank: int | None = None
        self.next_beat = 0.0


def follow(pulse: Pulse, rank: int) -> None:
    """The worker's side: connect, and start a thread that ends this process once the driver is gone.

    Raises:
        OSError: the driver cannot be reached.
    """
    every = interval(pulse.detection_s)
    connection = socket.create_connection(pulse.address, timeout=pulse.detection_s)
    connection.sendall(pulse.token + rank.to_bytes(4, "big"))
    connection.settimeout(every)
    threading.Thread(target=_follow, args=(connection, pulse.detection_s, every), name="heartbeat", daemon=True).start()


def _follow(connection: socket.socket, detection_s: float, every: float) -> None:
    heard = last = time.monotonic()
    reason = ""
    while not reason:
        # Should this thread not run, because another one holds the interpreter's lock or the process was stopped, the
        # kernel ends the process. A process that was stopped first has time to write its stacks.
        signal.setitimer(signal.ITIMER_REAL, detection_s + LAST_RESORT_S)
        try:
            received = connection.recv(4096)
            heard = time.monotonic()
            reason = "" if received else "has ended"
            time.sleep(every / 2)
            connection.send(BEAT)
        except TimeoutError:
            with suppress(TimeoutError):
                connection.send(BEAT)
        except OSError as error:
            reason = f"is gone ({error})"
        now = time.monotonic()
        if now - last > detection_s / 2:
            heard += now - last  # this process was paused
        last = now
        if now - heard > detection_s:
            reason = f"was silent for {now - heard:.0f} s"
    print(f"this worker exits: its driver {reason}", file=sys.stderr, flush=True)
    os._exit(REQUEUE)
