"""Each process of a run is killed at a random moment: exit code, last line, and the numbers of the run that resumes.

``VERL_KILLS=20`` kills more than one of each kind, and prints the table.
"""

import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import cycle, islice
from pathlib import Path

import pytest

from tests.e2e.runs import RAY_AGENTS, Run, assert_checkpoints_complete, records, six_steps
from verl.single_controller.environment import REQUEUE

SEED = int(os.environ.get("VERL_RECOVERY_SEED", "17"))
KILLS = int(os.environ.get("VERL_KILLS", "5"))

KINDS: dict[str, Callable[[Run, dict[int, str]], list[int]]] = {
    "driver": lambda run, living: [pid for pid in living if _parent(pid) == run.process.pid],
    "worker": lambda run, living: [pid for pid, command in living.items() if command.startswith("ray::_Host")],
    "raylet": lambda run, living: [pid for pid, command in living.items() if "/raylet/raylet" in command.split()[0]],
    "gcs": lambda run, living: [pid for pid, command in living.items() if "gcs_server" in command.split()[0]],
    "verifier": lambda run, living: [pid for pid, command in living.items() if "spawn_main" in command],
}

RESUME, COMPLETE = "to resume from step ", "the run is complete: "
ENDINGS: dict[str, dict[int, tuple[str, ...]]] = {
    "driver": {137: (RESUME, "to start again", COMPLETE)},
    # The run itself starts another attempt.
    "worker": {0: ("page: ", "metrics: ")},
    "raylet": {REQUEUE: (RESUME, "to start again", COMPLETE), 0: ("page: ", "metrics: ")},
    # The line before says how to resume it.
    "gcs": {REQUEUE: ("error: Ray's head at ", RESUME, "to start again", COMPLETE), 0: ("page: ", "metrics: ")},
    "verifier": {0: ("page: ", "metrics: ")},
}
"""What is killed -> exit code -> how the last line begins."""


def _parent(pid: int) -> int:
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def _command(folder: Path, model: Path, prompts: Path) -> list[str]:
    fast = ("rollout.name=hf", "trainer.detection_s=5", "trainer.max_restarts=3")
    return [*(o for o in six_steps(model, prompts, folder) if not o.startswith("trainer.max_restarts")), *fast]


def _kill_once(run: Run, kind: str, folder: Path, moment: float) -> None:
    """Kill one process of the kind: after ``moment`` of the steps, a fraction of one included."""
    run.wait_until(lambda: len(records(folder)) >= int(moment))
    time.sleep(moment % 1 * 2)
    found = KINDS[kind](run, run.processes())
    assert found or run.process.poll() is not None, f"no {kind} in {run.processes()}"
    for pid in found[:1]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.nightly
@pytest.mark.timeout(0)  # each process has a limit of its own
def test_a_process_that_is_killed_costs_no_number(
    tmp_path: Path, tiny_model: Path, arithmetic_prompts: Path, capsys: pytest.CaptureFixture[str]
):
    whole = tmp_path / "whole"
    assert Run(_command(whole, tiny_model, arithmetic_prompts), tmp_path / "whole.log").finish() == 0
    expected, draw, table = records(whole), random.Random(SEED), []
    assert len(expected) == 7
    for number, kind in enumerate(islice(cycle(KINDS), KILLS)):
        folder, log = tmp_path / f"{number}", tmp_path / f"{number}.log"
        run = Run(_command(folder, tiny_model, arithmetic_prompts), log)
        moment = draw.uniform(1, 6)
        _kill_once(run, kind, folder, moment)
        code = run.finish()
        last = log.read_text().rstrip().splitlines()[-1]
        agents = RAY_AGENTS if kind in ("driver", "raylet", "gcs") else ()
        assert run.survivors(agents) == []
        again = Run(_command(folder, tiny_model, arithmetic_prompts), tmp_path / f"{number}.again.log")
        assert again.finish() == 0, again.log.read_text()
        assert_checkpoints_complete(folder)
        same = records(folder) == expected
        table.append((kind, f"{moment:.2f}", code, last.replace(str(folder), "RUN"), same))
        with capsys.disabled():
            print("\n| {} | {} | {} | {} | {} |".format(*table[-1]), end="", flush=True)
        assert same, f"seed {SEED}, kill {number}: {table[-1]}"
        assert last.startswith(ENDINGS[kind].get(code, ())), f"seed {SEED}, kill {number}: {table[-1]}"
