"""What the stages of scripts/check_gpu.py share: their arguments, their answers, commands and processes."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]

MARKER = "VERL_CHECK_GPU"
"""Environment variable that identifies the processes of a stage: Ray's are in process groups of their own."""

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"

PATIENCE_S = 30.0
"""How long killed processes may take to be gone."""

GB = 1e9

Record = dict[str, Any]


class Context(NamedTuple):
    """The arguments of a stage."""

    stage: str
    device: str
    toy: bool
    out: Path
    """An empty folder for this stage alone."""

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"


class Outcome(NamedTuple):
    """The result of a stage that passed: a line for people, and figures."""

    figure: str
    figures: dict[str, Any]


class Failed(Exception):
    """The stage failed: why, the figures measured so far, and what to do if not what stages.toml says."""

    def __init__(self, reason: str, figures: Mapping[str, Any] | None = None, to_do: str | None = None) -> None:
        super().__init__(reason)
        self.figures = dict(figures or {})
        self.to_do = to_do


class Skipped(Exception):
    """This machine does not have what the stage needs."""


def require_gpu() -> None:
    """Check that torch sees a GPU.

    Raises:
        Failed: it does not.
    """
    # Imported here: the processes that only start stages need no torch.
    import torch

    if not torch.cuda.is_available():
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "a build for CPUs"
        to_do = "see whether nvidia-smi shows the GPU, and install torch for its driver; for a CPU --device cpu --toy"
        raise Failed(f"torch {torch.__version__}, {built}, sees no GPU", to_do=to_do)


def run_command(arguments: Sequence[str], log: Path) -> None:
    """Run Python with ``arguments``; its output goes to ``log`` and, if it fails, its last lines to the reason.

    Raises:
        Failed: it exits with another code than 0.
    """
    with log.open("wb") as output:
        code = subprocess.run(
            [sys.executable, *arguments], cwd=ROOT, stdout=output, stderr=subprocess.STDOUT
        ).returncode
    if code:
        raise Failed(f"{' '.join(arguments[:2])} ended with exit code {code}: {last_error(log)} (see {log})")


def last_error(log: Path) -> str:
    """The last line that names an error, otherwise the last line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "Error:" in line or line.startswith("error:")]
    return (errors or lines or ["no output"])[-1][:300]


def processes(variable: str, value: str) -> list[int]:
    """Ids of the living processes that inherited this environment variable."""
    ids = []
    for folder in Path("/proc").glob("[0-9]*"):
        # Others end meanwhile, or belong to someone else.
        with suppress(OSError):
            if f"{variable}={value}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                ids.append(int(folder.name))
    return ids


def kill_all(variable: str, value: str) -> None:
    """Kill the processes with this environment variable, and return when they are gone."""
    deadline = time.monotonic() + PATIENCE_S
    while (left := processes(variable, value)) and time.monotonic() < deadline:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)
