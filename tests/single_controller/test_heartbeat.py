"""Driver and workers notice within the detection time that the other is gone."""

import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from verl.single_controller.heartbeat import Heartbeat, Pulse


@pytest.fixture
def heartbeat() -> Iterator[Heartbeat]:
    driver = Heartbeat("127.0.0.1", detection_s=1.0)
    yield driver
    driver.close()


def lost_within(heartbeat: Heartbeat, seconds: float) -> dict[int, str]:
    deadline = time.monotonic() + seconds
    while not (lost := heartbeat.lost()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return lost


def greet(pulse: Pulse, rank: int, token: bytes | None = None) -> socket.socket:
    connection = socket.create_connection(pulse.address, timeout=5)
    connection.sendall((pulse.token if token is None else token) + rank.to_bytes(4, "big"))
    return connection


def test_a_silent_worker_is_lost_and_one_that_beats_is_not(heartbeat):
    with greet(heartbeat.pulse, 0) as beating, greet(heartbeat.pulse, 1):
        deadline = time.monotonic() + 1.6
        while time.monotonic() < deadline:
            beating.sendall(b".")
            time.sleep(0.05)
        assert heartbeat.lost() == {1: "silent for 2 s"} or heartbeat.lost() == {1: "silent for 1 s"}
        # The driver beats too.
        assert beating.recv(100)


def test_a_worker_that_ended_is_lost_after_ray_had_time_to_say_more(heartbeat):
    greet(heartbeat.pulse, 2).close()
    started = time.monotonic()
    assert lost_within(heartbeat, 5) == {2: "ended"}
    assert 0.5 < time.monotonic() - started < 2


def test_a_stranger_is_no_worker(heartbeat):
    with greet(heartbeat.pulse, 0, b"x" * 32) as stranger:
        assert stranger.recv(1) == b""
    with socket.create_connection(heartbeat.pulse.address) as mute:
        assert lost_within(heartbeat, 1.5) == {}
        mute.sendall(b"hello")
    assert heartbeat.lost() == {}


FOLLOWER = """
import sys, time
from verl.single_controller.heartbeat import Pulse, follow
follow(Pulse(("127.0.0.1", int(sys.argv[1])), bytes.fromhex(sys.argv[2]), 1.0), 0)
print("following", flush=True)
time.sleep(60)
"""


LOCKED = "from verl.single_controller import heartbeat; heartbeat.LAST_RESORT_S = 1" + FOLLOWER.replace(
    "time.sleep(60)", "import re; re.match('(a+)+b', 'a' * 40)"
)


@pytest.mark.slow
def test_a_worker_whose_interpreter_is_locked_ends_too(heartbeat):
    """A regular expression holds the interpreter's lock for hours."""
    address, token, _ = heartbeat.pulse
    worker = subprocess.run([sys.executable, "-c", LOCKED, str(address[1]), token.hex()], timeout=30)
    assert worker.returncode == -signal.SIGALRM


@pytest.mark.slow
@pytest.mark.parametrize("end", ["closed", "silent"])
def test_a_worker_without_driver_exits_with_the_code_to_requeue(end):
    with socket.create_server(("127.0.0.1", 0)) as server:
        command = [sys.executable, "-c", FOLLOWER, str(server.getsockname()[1]), "00" * 32]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as worker:
            assert worker.stdout is not None and worker.stderr is not None
            connection, _ = server.accept()
            assert worker.stdout.readline() == "following\n"
            for _ in range(15):  # longer than the detection time
                connection.sendall(b".")
                time.sleep(0.1)
            assert worker.poll() is None
            started = time.monotonic()
            if end == "closed":
                connection.close()
            assert worker.wait(10) == 75
            assert time.monotonic() - started < 2.5
            reason = "has ended|is gone" if end == "closed" else "was silent for 1 s"
            assert re.match(f"this worker exits: its driver ({reason})", worker.stderr.read())
            connection.close()
