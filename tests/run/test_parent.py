"""The process that starts a run: exit code and last words for each way in which the one that works may end."""

import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.slow

SCRIPT = """
import os, signal, sys, time
from types import SimpleNamespace
from verl.run.parent import run_in_child

folder = sys.argv[1]
run_in_child(lambda: exec(sys.argv[2]), SimpleNamespace(default_local_dir=folder, resume_mode="auto"))
assert not {"torch", "ray"} & sys.modules.keys()
print("done")
"""

AGAIN = "run the same command with trainer.default_local_dir="
LOST = "error: Ray's processes on this machine (raylet, GCS) are gone, and Ray ended the run with them; exit code 75"


def started(folder: Path, code: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SCRIPT, str(folder), code]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True
    )


@pytest.mark.parametrize(
    ("code", "exit_code", "first", "last"),
    [
        ("pass", 0, "", ""),
        ("print('said', file=sys.stderr); sys.exit(3)", 3, "said", "said"),
        ("sys.exit('error: x')", 1, "error: x", "error: x"),
        ("1 / 0", 1, "Traceback (most recent call last):", "ZeroDivisionError: division by zero"),
        ("os._exit(1)", 75, LOST, "to start again (there is no checkpoint yet), " + AGAIN),  # as Ray ends a process
        ("os._exit(75)", 75, "to start again", "to start again (there is no checkpoint yet), " + AGAIN),
        ("os.mkdir(folder + '/global_step_4'); os._exit(1)", 75, LOST, "to resume from step 4, " + AGAIN),
        ("open(folder + '/summary.json', 'w'); os._exit(1)", 75, LOST, "the run is complete: "),
        (
            "os.kill(os.getpid(), signal.SIGKILL)",
            137,
            "error: the run was ended by SIGKILL, as the system does when memory runs out",
            "to start again",
        ),
        ("import atexit; atexit.register(os.kill, os.getpid(), signal.SIGKILL)", 137, "", ""),  # after the run's end
        ("os.abort()", 134, "error: the run was ended by SIGABRT", "to start again"),
    ],
)
def test_how_a_run_ended_is_said(tmp_path: Path, code: str, exit_code: int, first: str, last: str):
    process = started(tmp_path, code)
    output, errors = process.communicate(timeout=60)
    lines = [line for line in errors.splitlines() if line] or [""]
    assert (process.returncode, output) == (exit_code, "done\n" if exit_code == 0 else "")
    assert lines[0].startswith(first) and lines[-1].startswith(last), errors
    assert first or not errors


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_signals_reach_the_run_once(tmp_path: Path, number: signal.Signals):
    code = f"""
global caught; caught = []
signal.signal({number}, lambda *_: caught.append(print("caught", flush=True)))
print("ready", flush=True)
while not caught: time.sleep(0.01)
time.sleep(0.5); sys.exit(7)"""
    process = started(tmp_path, code)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert (process.returncode, output) == (7, "caught\n")


def test_the_run_ends_with_the_process_that_started_it(tmp_path: Path):
    process = started(tmp_path, "print(os.getpid(), flush=True); time.sleep(600)")
    assert process.stdout is not None
    child = int(process.stdout.readline())
    process.kill()
    process.communicate(timeout=60)  # ends when nobody holds the pipes
    deadline = time.monotonic() + 30
    with suppress(psutil.NoSuchProcess):
        while psutil.Process(child).status() != psutil.STATUS_ZOMBIE:  # until whoever adopts it waits for it
            assert time.monotonic() < deadline
            time.sleep(0.01)
