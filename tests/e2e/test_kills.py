"""Runs are stopped, or one of their processes killed, at random moments: exit code, last line, and the numbers of the
run that resumes.

``VERL_KILLS=20`` kills more, ``VERL_RECOVERY_SEED`` draws other moments, and ``VERL_DEFAULT_THREADS=1`` gives workers
as many threads as users have; tests have one each. Every second round of the kinds allows no restart. The table that is
printed has a row for each kill.
"""

import os
import random
import re
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import cycle, islice
from pathlib import Path

import pytest
from conftest import ROOT, small_overrides

from tests.e2e.runs import RAY_AGENTS, Run, assert_checkpoints_complete, records, six_steps
from verl.checkpoint.folders import checkpoints
from verl.cluster.environment import REQUEUE

SEED = int(os.environ.get("VERL_RECOVERY_SEED", "17"))
KILLS = int(os.environ.get("VERL_KILLS", "5"))

PATIENCE_S = 600
"""For a run with its restarts, on a busy machine."""

ENGINE, IN_LOAD_WEIGHTS = "engine", "engine in load_weights"

KINDS: dict[str, Callable[[Run, Path], list[int]]] = {
    "driver": lambda run, logs: [pid for pid in run.processes() if _parent(pid) == run.process.pid],
    "worker": lambda run, logs: [_logged_process(logs / "rank_0.log")],
    ENGINE: lambda run, logs: [_logged_process(logs / "engines/rank_1.log")],
    IN_LOAD_WEIGHTS: lambda run, logs: [_logged_process(logs / "engines/rank_1.log")],
    "raylet": lambda run, logs: [pid for pid, name in run.processes().items() if "/raylet/raylet" in name.split()[0]],
    "gcs": lambda run, logs: [pid for pid, name in run.processes().items() if "gcs_server" in name.split()[0]],
    "verifier": lambda run, logs: [pid for pid, name in run.processes().items() if "spawn_main" in name],
}
"""The processes of a kind, by the logs of an attempt."""

STOPS: dict[str, Callable[[Run], None]] = {
    "preemption": lambda run: run.process.send_signal(signal.SIGTERM),
    # To every process of the group, vLLM's included, which brings signal handlers of its own.
    "Ctrl-C": lambda run: os.killpg(run.driver, signal.SIGINT),
}
"""What stops a run."""

RESUME, COMPLETE = "to resume from step ", "the run is complete: "
RESTARTED: dict[int, tuple[str, ...]] = {0: ("page: ", "metrics: ")}
"""The run itself starts another attempt."""
ENDINGS: dict[str, dict[int, tuple[str, ...]]] = {
    "driver": {137: (RESUME, "to start again", COMPLETE, *RESTARTED[0])},
    "worker": RESTARTED,
    ENGINE: RESTARTED,
    IN_LOAD_WEIGHTS: RESTARTED,
    # Where an error is last, the line before says how to resume.
    "raylet": {REQUEUE: ("error: worker ", RESUME, "to start again", COMPLETE), **RESTARTED},
    "gcs": {REQUEUE: ("error: Ray's head at ", RESUME, "to start again", COMPLETE), **RESTARTED},
    "verifier": RESTARTED,
    "preemption": {REQUEUE: ("SIGTERM: step ",), **RESTARTED},
    "Ctrl-C": {130: ("interrupted; complete checkpoints are kept",)},
}
"""What is killed -> exit code -> how the last line begins."""
NO_RESTART = {kind: {1: ("error: ",)} for kind in ("worker", ENGINE, IN_LOAD_WEIGHTS)}
"""The same of runs that may not restart, where it differs."""

Command = Callable[[Path, Path, Path], list[str]]
"""Options of a run by model, prompts and folder."""


def plain(model: Path, prompts: Path, folder: Path) -> list[str]:
    options = [o for o in six_steps(model, prompts, folder) if not o.startswith("trainer.max_restarts")]
    return [*options, "rollout.name=hf", "trainer.detection_s=5", "trainer.max_restarts=3"]


CARRIED_OVER = (
    *("async_training.max_staleness=2", "async_training.partial_rollout=true"),
    "algorithm.rollout_correction.rollout_is=token",
)

LONGER = [
    *("reward_manager.add_reward=true", "actor.optim.lr=1e-4", "trainer.total_training_steps=6"),
    *("trainer.save_freq=1", "trainer.max_ckpt_to_keep=2", "trainer.save_hf_model=false", "trainer.test_freq=4"),
    *("trainer.detection_s=20", "trainer.max_restarts=3", "rollout.max_num_seqs=4"),
]
"""Few slots, so that a step leaves responses open if it may."""


def asynchronous(model: Path, prompts: Path, folder: Path) -> list[str]:
    """Engines of their own that sample a step ahead."""
    return [
        *small_overrides(ROOT / "data/tiny_model", prompts, folder),
        *("rollout.nnodes=1", "rollout.n_gpus_per_node=2", "data.max_response_length=96"),
        *(*CARRIED_OVER, *LONGER),
    ]


def self_taught(model: Path, prompts: Path, folder: Path) -> list[str]:
    """A moving average of the policy is the teacher, under prompts that depend on verdicts."""
    options = [*plain(ROOT / "data/tiny_model", prompts, folder), "experiment=sdpo", "reward_manager.add_reward=false"]
    return [*options, "data.max_response_length=96", "rollout.kv_cache_memory_mb=128"]


def conversing(model: Path, prompts: Path, folder: Path) -> list[str]:
    """Conversations with a calculator, each of them begun and ended in one step."""
    prompts = ROOT / "data/arithmetic_tools/train.parquet"
    options = small_overrides(ROOT / "data/tiny_tool_model", prompts, folder)
    return [*options, "experiment=arithmetic_tools", "data.max_response_length=48", "data.val_sample_size=8", *LONGER]


def conversing_on(model: Path, prompts: Path, folder: Path) -> list[str]:
    """The same, carried over from step to step between turns and within one."""
    return [*conversing(model, prompts, folder), *CARRIED_OVER]


def asking(model: Path, prompts: Path, folder: Path) -> list[str]:
    """The same task by an agent over HTTP that is a function of what it reads."""
    agent = f"rollout.multi_turn.agent.path={ROOT}/data/arithmetic_tools/agent.py:agent"
    return [*conversing(model, prompts, folder), "rollout.multi_turn.tools=[]", agent]


def asking_on(model: Path, prompts: Path, folder: Path) -> list[str]:
    """The same, with engines of their own, and sessions that are carried over and played again."""
    return [*asking(model, prompts, folder), *CARRIED_OVER, "rollout.nnodes=1", "rollout.n_gpus_per_node=2"]


def _parent(pid: int) -> int:
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def _logged_process(log: Path) -> int:
    match = re.match(r"worker \d+ on \S+, process (\d+)", log.read_text())
    assert match, log
    return int(match[1])


def _kill_once(run: Run, kind: str, folder: Path, moment: float) -> None:
    """Stop the run, or kill one process of the kind: after ``moment`` of the steps, a fraction of one included."""
    # Where a step ends with a validation, the fourth here, engines have taken its weights before it is recorded.
    num_records = 2 + int(moment) % 3 if kind == IN_LOAD_WEIGHTS else int(moment)
    run.wait_until(lambda: len(records(folder)) >= num_records)
    logs = folder / "logs/attempt_1"
    if kind == IN_LOAD_WEIGHTS:
        # While the checkpoint is written, engines are idle; they then take the new weights.
        os.kill(_logged_process(logs / "engines/rank_1.log"), signal.SIGSTOP)
        run.wait_until(lambda: (logs / "engines/rank_0.log").read_text().endswith("load_weights: done\n"))
    else:
        time.sleep(moment % 1 * 2)
    if kind in STOPS:
        return STOPS[kind](run)
    found = KINDS[kind](run, logs)
    assert found or run.process.poll() is not None, f"no {kind} in {run.processes()}"
    for pid in found[:1]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.nightly
@pytest.mark.timeout(0)  # each process has a limit of its own
@pytest.mark.parametrize(
    ("command", "kinds"),
    [
        (plain, ("driver", "worker", "raylet", "gcs", "verifier")),
        (asynchronous, ("worker", ENGINE, IN_LOAD_WEIGHTS, "driver", "preemption", "Ctrl-C")),
        (self_taught, ("worker", "driver", "preemption")),
        (conversing, ("worker", "driver", "preemption", "Ctrl-C")),
        (conversing_on, ("worker", "driver", "preemption", "Ctrl-C")),
        (asking, ("worker", "driver", "preemption", "Ctrl-C")),
        (asking_on, (ENGINE, "worker", "driver", "preemption", "Ctrl-C")),
    ],
)
def test_killed_process_changes_no_number(
    tmp_path: Path,
    tiny_model: Path,
    arithmetic_prompts: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    command: Command,
    kinds: tuple[str, ...],
):
    if os.environ.get("VERL_DEFAULT_THREADS"):
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    whole, made_from = tmp_path / "whole", (tiny_model, arithmetic_prompts)
    assert Run(command(*made_from, whole), tmp_path / "whole.log").finish(PATIENCE_S) == 0
    expected, draw, wrong = records(whole), random.Random(SEED), []
    assert len(expected) == 7
    if command is self_taught:
        assert all(step["actor/teacher_loss"] > 0 for step in expected[1:])
    if command in (conversing, conversing_on, asking, asking_on):
        assert all(step["environment/calls"] > 0 for step in expected[1:])
    if command in (asynchronous, conversing_on, asking_on):
        # Wherever it is killed, there are half-finished responses; conversations end sooner.
        carried_over = [step["async/carried_over_tokens"] > 0 for step in expected[1:]]
        assert sum(carried_over) >= (5 if command is asynchronous else 2) and not carried_over[-1]
        assert max(step["async/lag/max"] for step in expected[1:]) == (1 if command is conversing_on else 2)
    for number, kind in enumerate(islice(cycle(kinds), KILLS)):
        folder, log = tmp_path / f"{number}", tmp_path / f"{number}.log"
        restarts = 3 if number // len(kinds) % 2 == 0 else 0
        endings = ENDINGS[kind] if restarts else NO_RESTART.get(kind, ENDINGS[kind])
        options = [*command(*made_from, folder), f"trainer.max_restarts={restarts}"]
        run = Run(options, log)
        moment = draw.uniform(1, 6)
        _kill_once(run, kind, folder, moment)
        code = run.finish(PATIENCE_S)
        last = log.read_text().rstrip().splitlines()[-1]
        agents = RAY_AGENTS if kind in ("driver", "raylet", "gcs") else ()
        assert run.survivors(agents) == []
        if kind == "preemption":
            assert max(checkpoints(folder)) == records(folder)[-1]["step"]
        if code:
            again = Run(options, tmp_path / f"{number}.again.log")
            assert again.finish(PATIENCE_S) == 0, again.log.read_text()
        assert_checkpoints_complete(folder)
        same = records(folder) == expected
        row = (kind, restarts, f"{moment:.2f}", code, last.replace(str(folder), "RUN"), same)
        with capsys.disabled():
            print("\n| {} | {} | {} | {} | {} | {} |".format(*row), end="", flush=True)
        named = "attempt 1 ended: engine worker 1 on ", " in load_weights"
        if kind == IN_LOAD_WEIGHTS and restarts and not all(text in log.read_text() for text in named):
            same = False
        if not (same and last.startswith(endings.get(code, ()))):
            wrong.append(row)
    assert not wrong, f"seed {SEED}: {wrong}"
