import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from verl.config import ConfigError
from verl.run.exit_codes import exit_with
from verl.single_controller import WorkerError
from verl.single_controller.cluster import resolve_device


@pytest.fixture(autouse=True)
def restored_handler() -> Iterator[None]:
    """``exit_with`` belongs to a process of its own; here its signal handler must not outlive the test."""
    previous = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, previous)


def failing(error: BaseException):
    def run() -> None:
        raise error

    return run


def test_a_run_that_succeeds_returns():
    calls: list[int] = []
    exit_with(lambda: calls.append(1))
    assert calls == [1]


@pytest.mark.parametrize("kind", [ConfigError, WorkerError])
def test_expected_errors_end_in_one_message(kind: type[Exception]):
    with pytest.raises(SystemExit) as caught:
        exit_with(failing(kind("rollout.n=1: too few")))
    # Python prints a text given to SystemExit on stderr and exits with 1.
    assert caught.value.code == "error: rollout.n=1: too few"


def test_ctrl_c_gives_the_shells_code(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as caught:
        exit_with(failing(KeyboardInterrupt()))
    assert caught.value.code == 130
    assert capsys.readouterr().err == "interrupted; complete checkpoints are kept\n"


def test_sigterm_unwinds_the_run():
    cleaned: list[int] = []

    def run() -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
            pytest.fail("SIGTERM did not end the run")
        finally:
            cleaned.append(1)  # Ray's processes and half-written checkpoints are removed in such blocks

    with pytest.raises(SystemExit) as caught:
        exit_with(run)
    assert caught.value.code == 143
    assert cleaned == [1]


def test_sigterm_gives_its_code_whatever_ray_makes_of_it():
    def run() -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        except SystemExit:
            raise SystemExit(1) from None  # as ray.wait does

    with pytest.raises(SystemExit) as caught:
        exit_with(run)
    assert caught.value.code == 143
    with pytest.raises(SystemExit) as caught:
        exit_with(failing(SystemExit(7)))
    assert caught.value.code == 7


WHILE_RAY_RUNS = """
import os, signal, time
from verl.run.exit_codes import exit_with
from verl.single_controller.cluster import ray_cluster

def run():
    with ray_cluster(world_size=1, device_type="cpu"):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)

exit_with(run)
"""


@pytest.mark.slow
def test_sigterm_while_ray_runs():
    # Ray's own handler would print a stack trace and abort the process.
    result = subprocess.run([sys.executable, "-c", WHILE_RAY_RUNS], capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stdout) == (143, "")
    assert "SIGTERM received" not in result.stderr


@pytest.mark.parametrize("error", [RuntimeError("bug"), ValueError("bug"), AssertionError("bug")])
def test_other_errors_keep_their_traceback(error: Exception):
    with pytest.raises(type(error), match="bug"):
        exit_with(failing(error))


@pytest.mark.parametrize(
    ("asked", "gpu", "expected"),
    [("auto", True, "cuda"), ("auto", False, "cpu"), ("cpu", True, "cpu"), ("cuda", True, "cuda")],
)
def test_the_device(monkeypatch: pytest.MonkeyPatch, asked: str, gpu: bool, expected: str):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    assert resolve_device(asked) == expected


def test_cuda_without_a_gpu_is_an_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="^device='cuda': torch sees no GPU; set device=auto or cpu$"):
        resolve_device("cuda")
