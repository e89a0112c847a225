"""Workers that hang, are stopped or die, and drivers that are gone: who notices when, and what is said."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from verl.cluster.failures import HeadLost, MachineError, NetworkError, WorkerError
from verl.single_controller.generation import EngineCalls
from verl.single_controller.heartbeat import Heartbeat, HeartbeatSettings
from verl.single_controller.supervision import Supervision, Supervisor
from verl.single_controller.worker_group import WorkerGroup
from verl.utils.process import Stage

Start = Callable[..., WorkerGroup]


@pytest.fixture
def supervised(ray_session: None, tmp_path: Path) -> Start:
    """Starts two workers that are watched; their logs go to ``tmp_path/logs``."""
    environment = {"PYTHONPATH": str(Path(__file__).parent)}
    groups: list[WorkerGroup] = []

    def start(**options: object) -> WorkerGroup:
        supervision = Supervision(logs=tmp_path / "logs", **options)
        place = ("example_workers:HangingWorker", None, (), 1, 2, "cpu")
        groups.append(WorkerGroup(*place, environment, supervision=supervision))
        return groups[-1]

    yield start
    for group in groups:
        group.close()


def test_a_stopped_worker_is_found_and_shows_its_stack(supervised: Start, tmp_path: Path):
    group = supervised(detection_s=2.0)
    pids = group.run("process")
    os.kill(pids[1], signal.SIGSTOP)
    started = time.monotonic()
    message = r"^worker 1 on [^ ]+ silent for \d s in rest; its log is .*/rank_1\.log$"
    with pytest.raises(MachineError, match=message) as caught:
        group.run("rest", 60)
    assert time.monotonic() - started < 50 and caught.value.where == "worker 1 in rest"
    for rank in (0, 1):
        assert "most recent call first" in (tmp_path / "logs" / f"rank_{rank}.stacks").read_text()
    # The other worker slept in the call; what it printed is in its log.
    assert "in rest" in (tmp_path / "logs" / "rank_0.stacks").read_text()
    log = (tmp_path / "logs" / "rank_0.log").read_text()
    assert log.startswith("worker 0 on ") and "resting for 60 s" in log


def test_a_call_that_takes_too_long(supervised: Start, tmp_path: Path):
    group = supervised()
    # To start may take longer.
    group._supervisor.options = replace(group._supervisor.options, phase_timeout_s=1.0)
    assert group.run("rest", 0) == [None, None]
    message = r"^rest has taken longer than trainer\.phase_timeout_s=1; the workers' stacks"
    engines = EngineCalls(group, "rest", 1)
    with pytest.raises(MachineError, match=message):
        for _ in range(100):  # each reply comes in time
            engines.send(0, 0.05)
            engines.receive(from_all=False)
    with pytest.raises(MachineError, match=message):
        group.run("rest", 60)
    assert "in rest" in (tmp_path / "logs" / "rank_1.stacks").read_text()


def test_death_network_and_program(supervised: Start, tmp_path: Path):
    group = supervised()
    with pytest.raises(WorkerError, match="(?s)^worker 1 on .* failed in fail:.*shapes differ") as program:
        group.run("fail", RuntimeError("shapes differ"))
    assert not isinstance(program.value, MachineError)
    # One line; what Ray and the worker say of it is in the worker's log.
    line = (
        r"^worker 1 on [^ ]+ lost its connection in fail: .*closed by peer \[10.0.0.2\]:4711; its log is .*rank_1.log$"
    )
    with pytest.raises(MachineError, match=line) as network:
        group.run("fail", RuntimeError("Connection closed by peer [10.0.0.2]:4711"))
    assert network.value.where == "worker 1 in fail"
    assert "ray::_Host.call" in (tmp_path / "logs" / "rank_1.log").read_text()
    # The one that died explains the other's broken connection.
    with pytest.raises(MachineError, match=r"^worker 0 on [^ ]+ died in exit_or_fail: .*; its log is .*rank_0\.log$"):
        group.run("exit_or_fail", NetworkError("worker 0 is gone"))


@pytest.mark.nightly
def test_collective_operations_have_a_time_limit(supervised: Start):
    group = supervised(collective_timeout_s=3.0)
    with pytest.raises(
        MachineError, match="(?s)^worker 0 on .* lost its connection in meet:.*Timed out waiting 3000ms"
    ):
        group.run("meet")


@pytest.fixture
def heartbeat() -> Iterator[Heartbeat]:
    driver = Heartbeat("127.0.0.1", detection_s=1.0)
    yield driver
    driver.close()


def greet(settings: HeartbeatSettings, rank: int, token: bytes | None = None) -> socket.socket:
    connection = socket.create_connection(settings.address, timeout=5)
    connection.sendall((settings.token if token is None else token) + rank.to_bytes(4, "big"))
    return connection


def test_a_silent_worker_is_lost_and_one_that_beats_is_not(heartbeat):
    with greet(heartbeat.settings, 0) as beating, greet(heartbeat.settings, 1):
        deadline = time.monotonic() + 1.6
        while time.monotonic() < deadline:
            beating.sendall(b".")
            time.sleep(0.05)
        assert heartbeat.lost() in ({1: "silent for 2 s"}, {1: "silent for 1 s"})
        assert heartbeat.lost(grace_s=60.0) == {}
        # The driver beats too.
        assert beating.recv(100)


def test_ended_worker_is_lost_after_grace(heartbeat):
    with greet(heartbeat.settings, 0, b"x" * 32) as stranger:
        assert stranger.recv(1) == b""
    with socket.create_connection(heartbeat.settings.address) as mute:
        mute.sendall(b"hello")
        greet(heartbeat.settings, 2).close()
        started = time.monotonic()
        while not (lost := heartbeat.lost()) and time.monotonic() < started + 5:
            time.sleep(0.05)
        assert lost == {2: "ended"}
        assert 0.5 < time.monotonic() - started < 2


FOLLOWER = """
import sys, time
from verl.single_controller.heartbeat import HeartbeatSettings, follow
follow(HeartbeatSettings(("127.0.0.1", int(sys.argv[1])), bytes.fromhex(sys.argv[2]), 1.0), 0)
print("following", flush=True)
time.sleep(60)
"""


LOCKED = "from verl.single_controller import heartbeat; heartbeat.LAST_RESORT_S = 1" + FOLLOWER.replace(
    "time.sleep(60)", "import re; re.match('(a+)+b', 'a' * 40)"
)


@pytest.mark.slow
def test_a_worker_whose_interpreter_is_locked_ends_too(heartbeat):
    """A regular expression holds the interpreter's lock for hours."""
    address, token, _ = heartbeat.settings
    worker = subprocess.run([sys.executable, "-c", LOCKED, str(address[1]), token.hex()], timeout=30)
    assert worker.returncode == -signal.SIGALRM


MEASURER = (
    """
import torch
from verl.rank.calculator import RepresentationMetricsCalculator
calculator = RepresentationMetricsCalculator()
"""
    + FOLLOWER.replace("time.sleep(60)", "calculator.measure([torch.randn(2048, 1, 512)])")
    + "print('measured', flush=True)"
)


@pytest.mark.slow
def test_worker_beats_while_it_measures_a_long_response():
    """An engine computes nothing else meanwhile: 4 s here, 11 s for 8192 tokens of width 1024 on two cores."""
    driver, lost = Heartbeat("127.0.0.1", detection_s=2.0), dict[int, str]()
    address, token, _ = driver.settings
    command = [sys.executable, "-c", MEASURER, str(address[1]), token.hex()]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as worker:
        assert worker.stdout is not None and worker.stdout.readline() == "following\n"
        started = time.monotonic()
        while worker.poll() is None:
            lost |= driver.lost()
            time.sleep(0.05)
        assert time.monotonic() - started > 2 and worker.stdout.read() == "measured\n"
    driver.close()
    assert not lost


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


def test_a_head_that_does_not_answer_any_more_is_lost(monkeypatch: pytest.MonkeyPatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setattr("ray.get_runtime_context", lambda: SimpleNamespace(gcs_address=address))
        monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "127.0.0.1")
        supervisor = Supervisor(Supervision(detection_s=0.5))
        # Longer than the detection time without a look: nobody has asked.
        for _ in range(3):
            time.sleep(0.6)
            supervisor.check("rest", 0)
    started = time.monotonic()
    with pytest.raises(HeadLost, match=f"^Ray's head at {address} has not answered for"):
        while time.monotonic() < started + 10:
            supervisor.check("rest", 0)
            time.sleep(0.05)
    assert time.monotonic() - started > 0.3
    supervisor.close()


def test_worker_lost_with_the_raylet_is_not_at_fault(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    path = str(tmp_path / "raylet")
    monkeypatch.setattr("ray._private.worker._global_node", SimpleNamespace(raylet_socket_name=path))
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as head, socket.socket(socket.AF_UNIX) as raylet:
        address = f"127.0.0.1:{head.getsockname()[1]}"
        monkeypatch.setattr("ray.get_runtime_context", lambda: SimpleNamespace(gcs_address=address))
        raylet.bind(path)
        raylet.listen()
        supervisor = Supervisor(Supervision())
        monkeypatch.setattr(supervisor, "_write_stacks", set)
        assert type(supervisor.failure(0, "died in advance: actor unavailable", "advance")) is MachineError
        raylet.close()  # as of a process that was killed, whose file stays
        lost = supervisor.failure(0, "died in advance: actor unavailable", "advance")
        supervisor.close()
    assert isinstance(lost, HeadLost) and "(raylet) are gone" in str(lost)


def test_what_workers_do_while_they_start_is_said_once_each(ray_session: None, monkeypatch: pytest.MonkeyPatch):
    said: list[str] = []
    supervisor = Supervisor(Supervision(say_stage=said.append))
    try:
        for rank, beats in ((0, b"\n\nimporting libr"), (0, b"importing libraries\n"), (1, b"importing libraries\n.")):
            supervisor.heartbeat._hear(rank, beats)
            supervisor.check("start", 1.0)
        supervisor.heartbeat._hear(1, b"importing libraries\nloading the model\n")
        supervisor.check("start", 1.0)
        supervisor.check("start", 2.0)
        assert said == ["importing libraries on 1 worker", "loading the model on 2 workers"]
        # A start may hold the interpreter lock for longer than any other call; the kernel ends it after 105 s.
        monkeypatch.setattr(supervisor, "failure", lambda rank, what, method: MachineError(what, ""))
        limits = [(104.0, "start", ""), (106.0, "start", "106 s in start"), (61.0, "rest", "61 s in rest")]
        for seconds, method, what in limits:
            supervisor.heartbeat._silent[1] = seconds
            with pytest.raises(MachineError, match=what) if what else nullcontext():
                supervisor.check(method, 1.0)
    finally:
        supervisor.close()


def test_a_beat_carries_what_the_process_does(heartbeat, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Stage, "name", "starting vllm")
    with greet(heartbeat.settings, 0) as worker:
        deadline = time.monotonic() + 20
        while heartbeat.stages != {0: "loading the model"} and time.monotonic() < deadline:
            worker.sendall(b"loading the model\n")
            time.sleep(0.05)
        assert heartbeat.stages == {0: "loading the model"}
        assert worker.recv(100).startswith(b"starting vllm\n")
