import socket

import pytest

from verl.utils.network import address_towards, interface_towards, reachable


def test_a_port_that_answers_and_one_that_does_not():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert reachable(f"127.0.0.1:{port}")
    assert not reachable(f"127.0.0.1:{port}")
    assert not any(map(reachable, ("host0", "host0:", ":6379", "127.0.0.1:99999", "[::1]:x")))


def test_the_loopback_is_no_address_for_others(monkeypatch: pytest.MonkeyPatch):
    # A machine's own name that resolves to 127.0.1.1, as on Debian, and its address.
    monkeypatch.setattr("verl.utils.network.own_addresses", lambda: {"10.1.2.3": "ib0"})
    monkeypatch.setattr("socket.gethostbyname", lambda host: {"own": "10.1.2.3", "debian": "127.0.1.1"}[host])
    assert (address_towards("own"), interface_towards("own")) == ("10.1.2.3", "ib0")
    assert not address_towards("debian").startswith("127.")
