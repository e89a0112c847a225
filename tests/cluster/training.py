"""Training on machines of :mod:`tests.cluster.machines`, to be disturbed."""

import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from conftest import small_overrides

from tests.cluster.machines import Machine, Process
from tests.e2e.runs import assert_checkpoints_complete, records
from verl.checkpoint.folders import checkpoints

DETECTION_S = 6

RAY = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    # Four times what a run asks for: on a busy computer a machine that is well answers late.
    "RAY_health_check_timeout_ms": str(1000 * DETECTION_S),
    "RAY_health_check_failure_threshold": "3",
    "RAY_gcs_rpc_server_reconnect_timeout_s": str(3 * DETECTION_S),
}
"""What docs/multinode.md says about Ray's own detection time."""

OPTIONS = [
    *("trainer.nnodes=2", "trainer.n_gpus_per_node=1", "rollout.name=hf", "data.train_batch_size=4", "rollout.n=2"),
    *("actor.ppo_mini_batch_size=2", "data.max_response_length=6", "calculator.enable=true", "trainer.test_freq=-1"),
    *("trainer.val_before_train=false", "data.val_files=[]", "trainer.save_freq=1", "trainer.save_hf_model=false"),
    # The same rates however many steps a run has: all are compared with one that has the most.
    *("actor.optim.lr_scheduler_type=constant", "actor.optim.lr=1e-3", "reward_manager.add_reward=true"),
    "trainer.max_ckpt_to_keep=2",
    *("trainer.total_training_steps=6", f"trainer.detection_s={DETECTION_S}", "trainer.machines_timeout_s=120"),
]


def ray_head(machine: Machine) -> None:
    _ray_start(machine, "--head", "--port=6379", "--include-dashboard=false")


def ray_join(machine: Machine, head: Machine) -> None:
    _ray_start(machine, f"--address={head.address}:6379")


def _ray_start(machine: Machine, *options: str) -> None:
    start = ["ray", "start", *options, f"--node-ip-address={machine.address}", "--num-cpus=1"]
    code, output = machine.run(start, **RAY)
    if "timed out during startup" in output:  # the computer is busy: Ray waits 30 s
        ray_leave(machine)
        code, output = machine.run(start, **RAY)
    assert code == 0, output


def ray_leave(machine: Machine) -> None:
    """Stop what is left of a cluster on a machine, as scripts/cluster.sh does when the head is gone."""
    machine.run(["ray", "stop", "--force"])


class Training:
    """The command of one run, to be started as often as it takes."""

    module = "verl.trainer.main_ppo"

    def __init__(self, folder: Path, model: Path, prompts: Path, options: Sequence[str] = ()) -> None:
        self.folder = folder
        self.overrides = [*small_overrides(model, prompts, folder), *OPTIONS, *options]
        self.starts = 0

    def start(self, machine: Machine, head: Machine, **variables: str) -> Process:
        self.starts += 1
        log = self.folder.with_name(f"{self.folder.name}.{self.starts}.log")
        environment = {"RAY_ADDRESS": f"{head.address}:6379"} | variables
        return machine.start(["python", "-m", self.module, *self.overrides], log, **environment)

    def start_everywhere(self, machines: Sequence[Machine], shared: Path) -> list[Process]:
        """Start the command on every machine, which scripts/cluster.sh joins; number 0 first."""
        self.starts += 1
        script = 'source scripts/cluster.sh; python=python; run_on_cluster "$@"'
        command = ["bash", "-euo", "pipefail", "-c", script, "bash", self.module, *self.overrides]
        variables = {"NNODES": str(len(machines)), "MASTER_ADDR": machines[0].address}
        variables |= {"VERL_CLUSTER_DIR": str(shared / "cluster"), "VERL_DETECTION_S": str(DETECTION_S)}
        logs = [self.folder.with_name(f"{self.folder.name}.{self.starts}.{machine.name}.log") for machine in machines]
        return [
            machine.start(command, log, NODE_RANK=str(rank), **variables)
            for rank, (machine, log) in enumerate(zip(machines, logs, strict=True))
        ]

    def records(self) -> list[dict[str, float]]:
        return records(self.folder)

    def call(self) -> str:
        """The method that worker 0 of the newest attempt executes; empty between two."""
        found = re.findall(r"^\d\d:\d\d:\d\d ([\w.]+(?:: done)?)$", self._log(), re.MULTILINE)
        return "" if not found or found[-1].endswith(": done") else found[-1]

    def host(self) -> str:
        return self._log().partition("worker 0 on ")[2].partition(",")[0]

    def _log(self) -> str:
        logs = sorted(self.folder.glob("logs/attempt_*/rank_0.log"), key=lambda path: int(path.parent.name[8:]))
        return logs[-1].read_text() if logs else ""

    def saving(self) -> bool:
        return any(self.folder.glob(".global_step_*.unfinished"))

    def assert_intact(self) -> None:
        """There are checkpoints, every one is complete, and nothing else is left of any."""
        assert checkpoints(self.folder)
        assert_checkpoints_complete(self.folder)


def wait_until(happened: Callable[[], object], process: Process | None = None, timeout_s: float = 240) -> None:
    """Look often until something has happened, as long as the process runs."""
    deadline = time.monotonic() + timeout_s
    while not happened():
        if process is not None:
            assert process.running(), f"ended with {process.popen.returncode}:\n{process.text}"
        assert time.monotonic() < deadline, "" if process is None else process.text
        time.sleep(0.005)


@contextmanager
def stopped_in(method: str, run: Training, machines: Sequence[Machine], process: Process) -> Iterator[None]:
    """Within the block worker 0 stands still in a method."""
    (pid,) = [worker_pid(machine) for machine in machines if machine.name == run.host()]
    while True:
        wait_until(lambda: run.call() == method, process)
        os.kill(pid, signal.SIGSTOP)
        if run.call() == method:
            break
        os.kill(pid, signal.SIGCONT)  # it was faster
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def worker_pid(machine: Machine) -> int:
    pids = [pid for pid, command in machine.processes().items() if command.startswith("ray::_Host")]
    assert len(pids) == 1, machine.processes()
    return pids[0]


def workers_gone(machine: Machine, timeout_s: float) -> bool:
    """Whether no worker of a run lives on this machine, at the latest after so many seconds."""
    deadline = time.monotonic() + timeout_s
    while any(command.startswith("ray::_Host") for command in machine.processes().values()):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True
