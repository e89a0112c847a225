import errno
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from verl.checkpoint.attempts import StaleAttempt
from verl.cluster.failures import RequeueError, WorkerError
from verl.config import ConfigError
from verl.run.exit_codes import Preempted, Preemption, run_to_exit_code


@pytest.fixture(autouse=True)
def restored_handler() -> Iterator[None]:
    """``run_to_exit_code`` owns its process; here its signal handler must not outlive the test."""
    previous = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    yield
    for number, handler in previous.items():
        signal.signal(number, handler)


def failing(error: BaseException) -> Callable[[], None]:
    def run() -> None:
        raise error

    return run


def terminated(number: signal.Signals = signal.SIGTERM) -> None:
    signal.raise_signal(number)
    pytest.fail("the signal did not end the run")


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
    "requeue at sigterm": (terminated, 75, ""),
    "requeue at sigusr1": (lambda: terminated(signal.SIGUSR1), 75, ""),
    "sigterm in ray": (terminated_while_ray_waits, 143, ""),
    "exit": (failing(SystemExit(7)), 7, ""),
    "preempted": (failing(Preempted("SIGUSR1: step 3 is saved")), 75, f"SIGUSR1: step 3 is saved; {AGAIN}"),
    "too few machines": (failing(RequeueError("1 of 2 machines")), 75, f"error: 1 of 2 machines; {AGAIN}"),
    "overtaken": (failing(StaleAttempt("global_step_2: not written")), "error: global_step_2: not written", ""),
}


@pytest.mark.slow
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
        run_to_exit_code(cleaning, requeue=ending.startswith("requeue"))
    assert (caught.value.code, capsys.readouterr().err, cleaned) == (code, message, [1])


@pytest.mark.slow
def test_full_disk_is_one_line(tmp_path: Path):
    line = (
        rf"error: {tmp_path}/metrics.jsonl: cannot be written \(No space left on device, [\d,.]+ MB free\); make room"
    )
    with pytest.raises(SystemExit, match=f"^{line}, and start it again$"):
        run_to_exit_code(failing(OSError(errno.ENOSPC, "No space left on device", f"{tmp_path}/metrics.jsonl")))
    with pytest.raises(OSError, match="Is a directory"):
        run_to_exit_code(failing(IsADirectoryError(errno.EISDIR, "Is a directory", "/runs")))


@pytest.mark.slow
def test_exhausted_memory_is_one_line():
    with pytest.raises(
        SystemExit, match=r"^error: start: the driver ran out of host memory at a peak of [\d.]+ GiB; lower "
    ):
        run_to_exit_code(failing(MemoryError()))
    with pytest.raises(RuntimeError, match="^shapes differ$"):
        run_to_exit_code(failing(RuntimeError("shapes differ")))


WHILE_RAY_RUNS = """
import os, signal, time
from verl.run.exit_codes import run_to_exit_code
from verl.cluster.start import ray_cluster

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


@pytest.fixture
def handlers() -> Iterator[None]:
    """Those of before must be back at the end."""
    numbers = (signal.SIGTERM, signal.SIGUSR1)
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)
    yield
    assert [signal.getsignal(number) for number in numbers] == [signal.SIG_IGN, signal.SIG_IGN]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_step_is_finished_and_saved(handlers, number):
    preemption, saved = Preemption(0), []
    with preemption.listening(), preemption.finishing_steps():
        preemption.after_step(3, lambda: saved.append(3))
        signal.raise_signal(number)
        preemption.check()  # while workers compute
        with pytest.raises(Preempted) as caught:
            preemption.after_step(4, lambda: saved.append(4))
    assert saved == [4] and str(caught.value) == f"{number.name}: step 4 is saved"


@pytest.mark.slow
def test_tracker_of_shared_memory_survives_signals_to_all():
    code = """
import os, signal, time
from multiprocessing import resource_tracker
from verl.run.exit_codes import run_to_exit_code

def run():
    tracker = resource_tracker._resource_tracker
    os.kill(tracker._pid, signal.SIGUSR1)
    time.sleep(0.5)
    assert tracker._check_alive()

run_to_exit_code(run)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_requeued_run_without_time_finishes_nothing(handlers, monkeypatch):
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    preemption = Preemption(30)
    with preemption.listening():
        preemption.check()
        signal.raise_signal(signal.SIGUSR1)
        with pytest.raises(Preempted, match="^SIGUSR1 while the run was starting$"):
            preemption.check()
        with preemption.finishing_steps():
            now = 130.0
            preemption.check()
            now = 130.5
            with pytest.raises(Preempted, match="^SIGUSR1: the step took longer than trainer.preemption_grace_s=30$"):
                preemption.check()


def test_a_second_signal_ends_the_process_at_once(handlers, monkeypatch):
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    preemption = Preemption(0)
    with preemption.listening(), preemption.finishing_steps():
        signal.raise_signal(signal.SIGUSR1)
        # The same one again: Slurm sends it to every process, and the shell hands on its own.
        now = 101.0
        signal.raise_signal(signal.SIGUSR1)
        now = 110.0
        with pytest.raises(SystemExit) as caught:
            signal.raise_signal(signal.SIGTERM)
    assert caught.value.code == 75
