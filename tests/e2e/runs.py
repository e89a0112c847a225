"""Trainings and evaluations that the tests start, and what they leave behind."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Self

import pytest
from conftest import ROOT, small_overrides

from verl.checkpoint.folders import checkpoints, read_state, verify_checkpoint

TIMING_PREFIXES = ("timing_s/", "perf/")
"""Prefixes of metrics that differ from run to run; on a CPU all others depend on the seed alone."""

MARKER = "VERL_TEST_RUN"
"""Environment variable that every process of a run inherits, by which survivors are found."""

STARTED: list["Job"] = []
"""Those that the end of a test has yet to look after."""

RAY_AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
"""After their driver was killed they ask its dead control service for a minute."""


def shared_memory() -> set[str]:
    """Names of the memory that workers of one engine share on a CPU."""
    return {path.name for path in Path("/dev/shm").glob("verl-*")}


def in_shell(script: str, *options: str, cwd: Path = ROOT) -> str:
    """Run ``train.sh`` or ``eval.sh`` to its successful end; returns what it prints."""
    ended = subprocess.run(["bash", str(ROOT / script), *options], cwd=cwd, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


class Job:
    """A process of ``module`` in a process group of its own, as a terminal would start it."""

    module: str

    def __init__(self, overrides: list[str], log: Path, prefix: tuple[str, ...] = ()) -> None:
        self.identity = uuid.uuid4().hex
        self.log = log
        self.shared_memory_before = shared_memory()
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-m", self.module, *overrides],
            cwd=ROOT,
            env=os.environ | {MARKER: self.identity},
            stdout=log.open("w"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        STARTED.append(self)

    @classmethod
    def complete(cls, overrides: list[str], log: Path, timeout_s: float = 240) -> Self:
        """Start a job and return it after its successful end."""
        job = cls(overrides, log)
        assert job.finish(timeout_s) == 0, log.read_text()
        return job

    @property
    def driver(self) -> int:
        """The process that works; the one that was started waits for it (verl/run/parent.py)."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(children[0]) if children else self.process.pid

    def wait_for_line(self, text: str) -> None:
        """Until the output holds ``text``."""
        self.wait_until(lambda: text in self.log.read_text())

    def wait_until(self, happened: Callable[[], bool], timeout_s: float = 240) -> None:
        """Look every few milliseconds until something has happened."""
        deadline = time.monotonic() + timeout_s
        while not happened():
            assert self.process.poll() is None, f"ended with {self.process.returncode}:\n{self.log.read_text()}"
            assert time.monotonic() < deadline, f"waited for {timeout_s} s:\n{self.log.read_text()}"
            time.sleep(0.002)

    def finish(self, timeout_s: float = 240) -> int:
        """The exit code, once it has ended."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"still running after {timeout_s} s:\n{self.log.read_text()}")

    def processes(self) -> dict[int, str]:
        """Living processes of this job: id -> command line."""
        living = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if f"{MARKER}={self.identity}".encode() in (folder / "environ").read_bytes():
                    living[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ")
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
        return living

    def survivors(self, besides: tuple[str, ...] = ()) -> list[str]:
        """Command lines of the processes that live on after a while, but for those that begin with ``besides``."""
        deadline = time.monotonic() + 30
        while True:
            living = [command for command in self.processes().values() if not command.startswith(besides)]
            if not living or time.monotonic() > deadline:
                return living
            time.sleep(0.2)

    def assert_no_shared_memory(self) -> None:
        """The memory of an engine's workers keeps no name, which would block the next engine."""
        deadline = time.monotonic() + 30
        # Other tests' engines may start meanwhile; theirs has one for a moment.
        while names := shared_memory() - self.shared_memory_before:
            assert time.monotonic() < deadline, f"{names}\n{self.log.read_text()}"
            time.sleep(0.2)

    def kill(self) -> None:
        """End all of its processes."""
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


class Evaluation(Job):
    """An evaluation."""

    module = "verl.trainer.main_eval"


class Analysis(Job):
    """An analysis."""

    module = "verl.trainer.main_analysis"


class FineTuning(Job):
    """A supervised training run."""

    module = "verl.trainer.main_sft"


class Run(Job):
    """A training run."""

    module = "verl.trainer.main_ppo"

    def workers(self) -> list[int]:
        """The ids of the processes that hold the models."""
        return sorted(pid for pid, command in self.processes().items() if command.startswith("ray::_Host"))

    def assert_nothing_left(self, folder: Path) -> None:
        """No process lives on, and no checkpoint is there that is not complete."""
        assert self.survivors() == []
        assert_checkpoints_complete(folder)


def assert_checkpoints_complete(folder: Path) -> None:
    """Every checkpoint of a run is complete, and nothing else is left of any."""
    assert not list(folder.glob(".*unfinished"))
    for step, checkpoint in checkpoints(folder).items():
        verify_checkpoint(checkpoint)
        assert read_state(checkpoint)["step"] == step > 0


def records(folder: Path) -> list[dict[str, float]]:
    """What a run has recorded so far, timing aside."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [
        {name: value for name, value in json.loads(line).items() if not name.startswith(TIMING_PREFIXES)}
        for line in lines
        if line.endswith("\n")
    ]


def assert_resumes(
    overrides: list[str], folder: Path, last: int, before: int, log: Path, kind: type[Job] = Run
) -> None:
    """A run without its last checkpoint resumes from the one before, to the same numbers."""
    whole = records(folder)
    shutil.rmtree(folder / f"global_step_{last}")
    (folder / "summary.json").unlink()
    kind.complete(overrides, log)
    assert f"resuming from {folder}/global_step_{before}\n" in log.read_text()
    assert records(folder) == whole


def six_steps(model: Path, prompts: Path, folder: Path) -> list[str]:
    """A run in which every step changes the weights and is saved: where no answer is right, rank shaping rewards."""
    return [
        *small_overrides(model, prompts, folder),
        *("reward_manager.add_reward=true", "actor.optim.lr=1e-3", "trainer.total_training_steps=6"),
        *("trainer.save_freq=1", "trainer.max_ckpt_to_keep=2", "trainer.save_hf_model=false", "trainer.test_freq=4"),
        # What a restart would do by itself is tried in tests/cluster/test_recovery.py.
        "trainer.max_restarts=0",
    ]
