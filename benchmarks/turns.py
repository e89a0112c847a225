"""Programs that take turns on one machine: each works for a step while the others wait.

A program calls :func:`wait_for_turn` before each of its steps, with the folder that it was given; the one that times
them holds a :class:`Player` for each.
"""

import os
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

FOLDER = "BENCH_TURNS"
"""The environment variable that names a program's folder of pipes, by which its processes are found, too."""


def wait_for_turn() -> None:
    """Say that a step has ended, and wait until the next may begin."""
    folder = Path(os.environ[FOLDER])
    with open(folder / "ready", "w") as ready:
        ready.write(".")
    with open(folder / "go") as go:
        if not go.read(1):
            raise SystemExit("the program that gives turns is gone")


class TurnSampler:
    """``data.sampler``: prompts in the order of the file; each step of the training waits for its turn."""

    def __init__(self, dataset: Any, config: Any, seed: int) -> None:
        self.num_prompts = len(dataset)

    def __len__(self) -> int:
        return self.num_prompts

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.num_prompts))

    def update(self, outcome: Any) -> None:
        """A step has ended but for its weights' way to the engines, which is part of the next one's time."""
        wait_for_turn()


class Player:
    """A program in its own processes."""

    def __init__(self, command: Sequence[str], folder: Path, environment: Mapping[str, str], timeout_s: float) -> None:
        """Start it, and wait until its first turn.

        Args:
            folder: for its pipes and its output.
            timeout_s: longest step.
        """
        folder.mkdir(parents=True)
        for name in ("ready", "go"):
            os.mkfifo(folder / name)
        self.folder, self.timeout_s = folder, timeout_s
        self._log: IO[bytes] = open(folder / "log", "wb")
        # Both pipes stay open at both ends, so that neither side sees the end of one between two turns.
        self._ready, self._go = (os.open(folder / name, os.O_RDWR | os.O_NONBLOCK) for name in ("ready", "go"))
        variables = {**os.environ, **environment, FOLDER: str(folder)}
        self.process = subprocess.Popen(
            command, env=variables, stdin=subprocess.DEVNULL, stdout=self._log, stderr=subprocess.STDOUT
        )
        self._wait()

    def step(self) -> float:
        """Let it work for a step; returns the seconds."""
        started = time.perf_counter()
        os.write(self._go, b".")
        self._wait()
        return time.perf_counter() - started

    def cpu_seconds(self) -> float:
        """CPU time of its living processes so far, Ray's among them."""
        ticks = 0
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it ends meanwhile, or belongs to someone else
                if f"{FOLDER}={self.folder}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                    ticks += sum(map(int, (folder / "stat").read_text().rpartition(")")[2].split()[11:13]))
        return ticks / os.sysconf("SC_CLK_TCK")

    def end(self) -> None:
        """Stop it."""
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self._ready)
        os.close(self._go)
        self._log.close()

    def _wait(self) -> None:
        deadline = time.perf_counter() + self.timeout_s
        while True:
            with suppress(BlockingIOError):
                if os.read(self._ready, 1):
                    return
            if self.process.poll() is not None:
                raise RuntimeError(f"{self.process.args} ended: {self._tail()}")
            if time.perf_counter() > deadline:
                raise TimeoutError(f"{self.process.args} took more than {self.timeout_s:g} s: {self._tail()}")
            time.sleep(0.005)

    def _tail(self) -> str:
        return (self.folder / "log").read_text(errors="replace")[-2000:]
