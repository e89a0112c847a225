"""Addresses and ports of this machine, and whether a port answers."""

import random
import socket
from contextlib import suppress
from typing import Any

import psutil

LOOPBACK = "127.0.0.1"
"""The only address that a run on one machine uses."""


def loopback_interface() -> str:
    """Return the name of the network interface of ``LOOPBACK``."""
    interfaces: dict[str, Any] = psutil.net_if_addrs()
    return next(name for name, entries in interfaces.items() if any(entry.address == LOOPBACK for entry in entries))


def reachable(address: str, timeout_s: float = 2.0) -> bool:
    """Return whether something listens at ``host:port``."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        return False
    try:
        with socket.create_connection((host, int(port)), timeout=timeout_s):
            return True
    except OSError:
        return False


def own_addresses() -> dict[str, str]:
    """Return IPv4 address -> interface for this machine, without the loopback."""
    return {
        entry.address: name
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family == socket.AF_INET and not entry.address.startswith("127.")
    }


def address_towards(host: str) -> str:
    """Return this machine's address on the way to ``host``; if that is this machine, one that others can reach.

    Raises:
        OSError: ``host`` has no address, or no way leads there.
    """
    target, own = socket.gethostbyname(host), own_addresses()
    if target in own:
        return target
    if target.startswith("127."):
        # The machine's own name, as some installations have it in /etc/hosts: take the way out.
        target = "192.0.2.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((target, 9))  # sends nothing
        except OSError:
            if own:
                return next(iter(own))
            raise
        return str(probe.getsockname()[0])


def interface_towards(host: str) -> str:
    """Return the network interface of :func:`address_towards`; empty if it is the loopback."""
    return own_addresses().get(address_towards(host), "")


def free_port() -> int:
    """Return a port that nothing listens on. Raises ``OSError`` if none is found."""
    # Below the ephemeral ports, so that no outgoing connection takes it before the workers do.
    ports = random.SystemRandom().sample(range(20000, 30000), k=100)
    for port in ports:
        with socket.socket() as listener, suppress(OSError):
            listener.bind(("", port))
            return port
    raise OSError(f"none of a hundred ports from {min(ports)} to {max(ports)} is free on this machine")
