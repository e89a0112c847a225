"""scripts/cluster.sh with a command that takes no time: start, join, leave, and what is said when that fails."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.machines import HEAD, NETWORK, Machine, Process, cluster

pytestmark = pytest.mark.slow

SOURCED = 'source scripts/cluster.sh; python=python; run_on_cluster job "$@"'
JOB = """
import os, stat, subprocess, sys, time
print("arguments:", *sys.argv[1:])
print("address:", os.environ["RAY_ADDRESS"])
path = os.environ.get("RAY_AUTH_TOKEN_PATH", "")
if path:
    print("mode:", oct(stat.S_IMODE(os.stat(path).st_mode)))
    print("token:", open(path).read())
def listening():
    return sorted({line.split()[3] for line in subprocess.check_output(["ss", "-Hltn"], text=True).splitlines()})
deadline = time.monotonic() + 60
while not any(port.endswith(":6380") for port in listening()) and time.monotonic() < deadline:
    time.sleep(0.2)  # Ray opens its ports one after the other
print("ports:", *listening())
print("found:", os.path.exists("/tmp/ray/ray_current_cluster"))
print("ready", flush=True)
time.sleep(float(os.environ.get("JOB_SECONDS", 0)))
sys.exit(3)
"""


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    (tmp_path / "job.py").write_text(JOB)
    return tmp_path


@pytest.fixture
def machines(shared: Path) -> Iterator[tuple[Machine, ...]]:
    with cluster(2, shared / "machines", [shared]) as found:
        yield found


def start(machine: Machine, shared: Path, rank: int, *arguments: str, **variables: str) -> Process:
    known = {"NNODES": "2", "NODE_RANK": str(rank), "MASTER_ADDR": "machine1", "PYTHONPATH": str(shared)}
    known |= {"VERL_CLUSTER_DIR": str(shared / "cluster"), "VERL_JOIN_TIMEOUT": "60"}
    command = ["bash", "-euo", "pipefail", "-c", SOURCED, "bash", *arguments]
    return machine.start(command, shared / f"{machine.name}.log", **known | variables)


def line(text: str, name: str) -> str:
    (found,) = [row.partition(": ")[2] for row in text.splitlines() if row.startswith(f"{name}: ")]
    return found


def test_machines_join_and_leave_with_the_exit_code(machines, shared):
    one, two = machines
    # What an earlier start left that was killed while it said so.
    (shared / "cluster").mkdir()
    mark = shared / "cluster" / "failed"
    mark.write_text("ray start failed on machine1")
    os.utime(mark, (time.time() - 60,) * 2)
    second = start(two, shared, 1, "seed=1")
    second.wait_for_line("waiting for machine 0 at machine1:6379")  # it is early
    first = start(one, shared, 0, "-x", "seed=1")
    assert (first.wait(), second.wait()) == (3, 3), first.text + second.text
    assert line(first.text, "arguments") == "-x trainer.nnodes=2 seed=1"
    assert line(first.text, "address") == f"{HEAD}:6379"
    assert line(first.text, "mode") == "0o600" and len(line(first.text, "token")) == 64
    # No dashboard. What listens on all interfaces is Ray's own traffic, for which it has no other choice.
    ports = line(first.text, "ports").split()
    assert f"{HEAD}:10001" not in ports and f"[::ffff:{HEAD}]:6380" in ports
    assert not [port for port in ports if port.endswith(":8265")]
    assert f"machine 1 of 2 (machine2, {NETWORK}.2) has joined {HEAD}:6379" in second.text
    assert line(first.text, "token") not in second.text
    assert "Killed" not in first.text + second.text
    assert one.survivors() == two.survivors() == []
    assert not (shared / "cluster").exists()
    # Another run on the same machine does not take the cluster for its own.
    assert line(first.text, "found") == "False"


@pytest.mark.nightly
def test_a_head_that_cannot_start_tells_the_others(machines, shared):
    one, two = machines
    second = start(two, shared, 1)
    second.wait_for_line("waiting for machine 0 at machine1:6379")
    first = start(one, shared, 0, RAY_TMPDIR="/dev/null")
    assert first.wait() == 1 and "cluster.sh: machine1: ray start failed:" in first.text, first.text
    assert second.wait(5) == 1
    last = "error: machine2: machine 0 at machine1:6379 gave up: ray start failed on machine1"
    assert second.text.splitlines()[-1] == last
    assert one.survivors() == two.survivors() == []
    # The log tells why; nothing else is left to mislead the next start.
    assert [path.name for path in (shared / "cluster").iterdir()] == ["ray-machine1.log"]


@pytest.mark.nightly
def test_the_end_of_a_job_is_announced_to_every_process(machines, shared):
    """As Slurm does, to all of a step. The driver alone acts on it; Ray and the other machines wait for it."""
    one, two = machines
    (shared / "cluster").mkdir()
    (shared / "cluster" / "mine.txt").write_text("kept")
    first, second = start(one, shared, 0, JOB_SECONDS="120"), start(two, shared, 1)
    first.wait_for_line("ready")
    second.wait_for_line("has joined")
    token = (shared / "cluster" / "token").read_text()
    # Another command as machine 0 meanwhile: it must not take over the folder.
    again = start(one, shared, 0, MASTER_ADDR=HEAD)
    assert (again.wait(), (shared / "cluster" / "token").read_text()) == (1, token)
    assert f"{HEAD}:6379 is in use" in again.text
    for machine in machines:
        for pid, command in machine.processes().items():
            if not command.startswith("python -m job"):
                os.kill(pid, signal.SIGUSR1)
    # The job has no handler and gets the signal that the shell hands on.
    assert (first.wait(), second.wait()) == (128 + signal.SIGUSR1,) * 2, first.text + second.text
    assert "machine 1: SIGUSR1: waiting for the end of the run" in second.text
    assert one.survivors() == two.survivors() == []
    # A folder that was there before is left with what it held.
    assert [path.name for path in (shared / "cluster").iterdir()] == ["mine.txt"]


@pytest.mark.nightly
def test_a_machine_that_waits_can_be_stopped(machines, shared):
    _, two = machines
    second = start(two, shared, 1)
    second.wait_for_line("waiting for machine 0 at machine1:6379")
    second.signal(signal.SIGTERM)
    assert second.wait(20) == -signal.SIGTERM
    assert two.survivors() == []


@pytest.mark.nightly
def test_a_wrong_token_is_one_line(machines, shared):
    one, two = machines
    first = start(one, shared, 0, RAY_AUTH_TOKEN="a" * 64, JOB_SECONDS="300")
    first.wait_for_line("ready")
    second = start(two, shared, 1, RAY_AUTH_TOKEN="b" * 64)
    assert second.wait() == 1
    (said,) = second.text.splitlines()
    assert said.startswith(
        f"error: machine2: RAY_ADDRESS={HEAD}:6379: the cluster refuses the token of RAY_AUTH_TOKEN; set RAY_AUTH_TOKEN"
    )
    assert "bbbb" not in said and two.survivors() == []
    # What stops the head reaches the command, and nothing is left.
    first.signal(signal.SIGTERM)
    assert first.wait() == 128 + signal.SIGTERM
    assert one.survivors() == []


@pytest.mark.nightly
def test_lost_head_ends_others_with_retry_code(machines, shared):
    one, two = machines
    first, second = start(one, shared, 0, JOB_SECONDS="300"), start(two, shared, 1)
    first.wait_for_line("ready")
    second.wait_for_line("has joined")
    one.power_off()
    assert second.wait(120) == os.EX_TEMPFAIL, second.text
    assert f"machine 1 has lost the head at {HEAD}:6379; exit code 75" in second.text
    assert two.survivors() == []


DEVICE = """
from verl.cluster.start import gpus_per_machine, resolve_device
print("device:", resolve_device("auto", 1, 1, 30.0), gpus_per_machine(), resolve_device("cpu"))
"""


@pytest.mark.nightly
def test_a_cluster_is_used_from_elsewhere_and_knows_the_device(machines, shared):
    one, two = machines
    ray = ["--object-store-memory=100000000", "--disable-usage-stats"]
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "a" * 64}
    head = ["--head", f"--node-ip-address={HEAD}", "--port=6379", "--num-gpus=2", *ray]
    assert one.run(["ray", "start", *head], **token)[0] == 0
    variables = token | {"RAY_ADDRESS": f"{HEAD}:6379", "PYTHONPATH": str(shared)}
    code, text = two.run(["bash", "-euo", "pipefail", "-c", SOURCED], **variables)
    assert code == 3, text
    assert line(text, "address") == f"{HEAD}:6379" and two.survivors() == []
    # This machine has no GPU, and the other one says that it has two.
    assert two.run(["ray", "start", f"--address={HEAD}:6379", *ray], **token)[0] == 0
    code, text = two.run(["python", "-c", DEVICE], **token)
    assert code == 0 and line(text, "device") == "cuda 2 cpu", text
    # A token that is missing is said at once.
    code, text = two.run(["bash", "-euo", "pipefail", "-c", SOURCED], RAY_ADDRESS=f"{HEAD}:6379")
    assert code == 1 and "the cluster refuses the token of this machine, which has none" in text.splitlines()[-1]
