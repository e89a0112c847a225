import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from verl.checkpoint.attempts import StaleAttempt
from verl.config import ConfigError
from verl.run.exit_codes import run_to_exit_code
from verl.run.preemption import Preempted
from verl.single_controller.failures import RequeueError, WorkerError


@pytest.fixture(autouse=True)
def restored_handler() -> Iterator[None]:
    """``run_to_exit_code`` owns its process; here its signal handler must not outlive the test."""
    previous = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, previous)


def failing(error: BaseException) -> Callable[[], None]:
    def run() -> None:
        raise error

    return run


def terminated() -> None:
    signal.raise_signal(signal.SIGTERM)
    pytest.fail("SIGTERM did not end the run")


def terminated_while_ray_waits() -> None:
    try:
        terminated()
    except SystemExit:
        raise SystemExit(1) from None  # as ray.wait does


AGAIN = "exit code 75: start it again\n"

ENDINGS = {
    # Python prints a text given to SystemExit on stderr and exits with 1.
    "config": (failing(ConfigError("rollout.n=1: too few")), "error: rollout.n=1: too few", ""),
    "worker": (failing(WorkerError("worker 0 died")), "error: worker 0 died", ""),
    "ctrl-c": (failing(KeyboardInterrupt()), 130, "interrupted; complete checkpoints are kept\n"),
    "sigterm": (terminated, 143, ""),
    "sigterm in ray": (terminated_while_ray_waits, 143, ""),
    "exit": (failing(SystemExit(7)), 7, ""),
    "preempted": (failing(Preempted("SIGUSR1: step 3 is saved")), 75, f"SIGUSR1: step 3 is saved; {AGAIN}"),
    "too few machines": (failing(RequeueError("1 of 2 machines")), 75, f"1 of 2 machines; {AGAIN}"),
    "overtaken": (failing(StaleAttempt("global_step_2: not written")), "error: global_step_2: not written", ""),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_run_ends_with_a_code_and_one_message(ending: str, capsys: pytest.CaptureFixture[str]):
    run, code, message = ENDINGS[ending]
    cleaned: list[int] = []

    def cleaning() -> None:
        try:
            run()
        finally:
            cleaned.append(1)  # in such blocks Ray is stopped and unfinished checkpoints are removed

    with pytest.raises(SystemExit) as caught:
        run_to_exit_code(cleaning)
    assert (caught.value.code, capsys.readouterr().err, cleaned) == (code, message, [1])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_training_that_is_told_to_go_is_requeued(number: signal.Signals):
    def told() -> None:
        signal.raise_signal(number)

    before = signal.getsignal(signal.SIGUSR1)
    try:
        with pytest.raises(SystemExit) as caught:
            run_to_exit_code(told, requeue=True)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert caught.value.code == 75


WHILE_RAY_RUNS = """
import os, signal, time
from verl.run.exit_codes import run_to_exit_code
from verl.single_controller.cluster import ray_cluster

def run():
    with ray_cluster(world_size=1, device_type="cpu"):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)

run_to_exit_code(run)
"""


@pytest.mark.nightly
def test_sigterm_while_ray_runs():
    # Ray's own handler would print a stack trace and abort the process.
    result = subprocess.run([sys.executable, "-c", WHILE_RAY_RUNS], capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stdout) == (143, "")
    assert "SIGTERM received" not in result.stderr
