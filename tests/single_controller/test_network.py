import socket

import pytest

from verl.single_controller.network import (
    address_towards,
    interface_towards,
    reachable,
)
from verl.utils.distributed import listening_socket


def test_a_port_that_answers_and_one_that_does_not():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert reachable(f"127.0.0.1:{port}")
    assert not reachable(f"127.0.0.1:{port}")
    assert not any(map(reachable, ("host0", "host0:", ":6379", "127.0.0.1:99999", "[::1]:x")))


def test_the_loopback_is_no_address_for_others(monkeypatch: pytest.MonkeyPatch):
    # A machine's own name that resolves to 127.0.1.1, as on Debian, and its address.
    monkeypatch.setattr("verl.single_controller.network.own_addresses", lambda: {"10.1.2.3": "ib0"})
    monkeypatch.setattr("socket.gethostbyname", lambda host: {"own": "10.1.2.3", "debian": "127.0.1.1"}[host])
    assert (address_towards("own"), interface_towards("own")) == ("10.1.2.3", "ib0")
    assert not address_towards("debian").startswith("127.")


def test_a_socket_listens_on_one_address_alone():
    with listening_socket("127.0.0.1", 0) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"
        with pytest.raises(OSError, match="in use"):
            listening_socket("127.0.0.1", listener.getsockname()[1])
    # Behind a translation of addresses: an address of no interface here.
    with listening_socket("192.0.2.77", 0) as listener:
        assert listener.getsockname()[0] == "0.0.0.0"  # noqa: S104
