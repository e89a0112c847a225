"""Workers that hang, are stopped or die: what the driver says, and what is in the workers' folder."""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from verl.single_controller.exchange import Exchange
from verl.single_controller.failures import MachineError, NetworkError, WorkerError
from verl.single_controller.supervision import Supervision
from verl.single_controller.worker_group import WorkerGroup

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
    assert time.monotonic() - started < 30 and caught.value.where == "worker 1 in rest"
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
    with pytest.raises(MachineError, match=message):
        group.run("rest", 60)
    assert "in rest" in (tmp_path / "logs" / "rank_1.stacks").read_text()


def test_an_engine_that_always_replies_is_watched_too(supervised: Start):
    group = supervised()
    group._supervisor.options = replace(group._supervisor.options, phase_timeout_s=1.0)
    engines = Exchange(group, "rest", 1)
    with pytest.raises(MachineError, match="^rest has taken longer than"):
        for _ in range(100):
            engines.send(0, 0.05)
            engines.receive(from_all=False)


def test_death_network_and_program(supervised: Start):
    group = supervised()
    with pytest.raises(WorkerError, match="(?s)^worker 1 on .* failed in fail:.*shapes differ") as program:
        group.run("fail", RuntimeError("shapes differ"))
    assert not isinstance(program.value, MachineError)
    with pytest.raises(MachineError, match="^worker 1 on .* lost its connection in fail:") as network:
        group.run("fail", RuntimeError("Connection closed by peer [10.0.0.2]:4711"))
    assert network.value.where == "worker 1 in fail"
    # The one that died explains the other's broken connection.
    with pytest.raises(MachineError, match="^worker 0 on .* died in exit_or_fail"):
        group.run("exit_or_fail", NetworkError("worker 0 is gone"))


@pytest.mark.nightly
def test_collective_operations_have_a_time_limit(supervised: Start):
    group = supervised(collective_timeout_s=3.0)
    with pytest.raises(
        MachineError, match="(?s)^worker 0 on .* lost its connection in meet:.*Timed out waiting 3000ms"
    ):
        group.run("meet")
