"""Finds this machine's addresses and free ports, and checks whether an address is reachable."""

import random
import socket
from contextlib import suppress
from typing import Any

import psutil

LOOPBACK = "127.0.0.1"
"""The only address that a run on a single machine uses."""


def loopback_interface() -> str:
    interfaces: dict[str, Any] = psutil.net_if_addrs()
    return next(name for name, entries in interfaces.items() if any(entry.address == LOOPBACK for entry in entries))


def reachable(address: str, timeout_s: float = 2.0) -> bool:
    """Return whether a process accepts connections at ``address`` (``host:port``)."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        return False
    try:
        with socket.create_connection((host, int(port)), timeout=timeout_s):
            return True
    except OSError:
        return False


def own_addresses() -> dict[str, str]:
    """Return the network interfaces of this machine, except for loopback, keyed by IPv4 address."""
    return {
        entry.address: name
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family == socket.AF_INET and not entry.address.startswith("127.")
    }


def address_towards(host: str) -> str:
    """Return this machine's address on the route to ``host``, or an external address if ``host`` is this machine.

    Raises ``OSError`` if ``host`` cannot be resolved or there is no route to it.
    """
    target, own = socket.gethostbyname(host), own_addresses()
    if target in own:
        return target
    if target.startswith("127."):
        # Some installations map the machine's own name to loopback in /etc/hosts; use the default route instead.
        target = "192.0.2.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((target, 9))  # sends nothing
        except OSError:
            if own:
                return next(iter(own))
            raise
        return str(probe.getsockname()[0])


def free_port() -> int:
    """Return a port on which no process listens, or raise ``OSError`` if none is found."""
    # Stay below the ephemeral range so that no outgoing connection takes the port before the workers do.
    ports = random.SystemRandom().sample(range(20000, 30000), k=100)
    for port in ports:
        with socket.socket() as listener, suppress(OSError):
            listener.bind(("", port))
            return port
    raise OSError(f"none of a hundred ports from {min(ports)} to {max(ports)} is free on this machine")
