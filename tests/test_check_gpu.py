"""The check of a GPU machine: the runner with stages of the test's own, and at night every real stage on a CPU."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import check_gpu
import pytest
from conftest import ROOT
from gpu_checks import testing, training
from gpu_checks.common import Failed

STAGES = """
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
    "offload": {"status": "failed", "reason": "off by one", "figures": {"value": 1}},
    "attention": {"status": "skipped", "reason": "one GPU here"},
}
result.write_text(json.dumps(known[name]))
"""


def run(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    stages = tmp_path / "stages.py"
    stages.write_text(STAGES)
    command = ["bash", "scripts/check_gpu.sh", "--out", str(tmp_path / "out"), "--stages", str(stages), *arguments]
    # The interpreter of the tests, whichever environments are active.
    environment = os.environ | {"VERL_ENV": str(Path(sys.prefix))}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)


def record(tmp_path: Path, name: str) -> dict:
    (path,) = (tmp_path / "out").glob(f"*-{name}.json")
    return json.loads(path.read_text())


@pytest.mark.slow
def test_stages_go_on_after_one_that_fails(tmp_path):
    names = ("versions", "3", "offload", "attention")
    done = run(tmp_path, *(word for name in names for word in ("--stage", name)))
    assert done.returncode == 1
    first, *lines, last = done.stdout.splitlines()
    assert first == f"4 stages of at most 600 s each, into {tmp_path / 'out'}"
    assert [line.split()[1:3] for line in lines] == [
        *(["versions", "passed"], ["sync", "failed"], ["offload", "failed"], ["attention", "skipped"])
    ]
    assert lines[0].endswith("seven") and lines[2].endswith(f"off by one  ({tmp_path}/out/04-offload.log)")
    assert last == f"1 passed, 2 failed, 1 skipped: {tmp_path / 'out'}"
    assert record(tmp_path, "sync")["reason"] == "ended with exit code 3: the last words"
    assert record(tmp_path, "offload")["figures"] == {"value": 1}
    assert record(tmp_path, "versions")["figures"] == {"value": 7}
    assert Path(record(tmp_path, "sync")["log"]).read_text() == "the last words\n"


@pytest.mark.slow
def test_a_stage_that_takes_too_long_is_killed_with_all_it_started(tmp_path):
    done = run(tmp_path, "--stage", "sleep", "--stage", "versions", "--limit", "10")
    assert done.returncode == 1
    assert record(tmp_path, "sleep")["reason"] == "took longer than 10 s and was killed"
    assert record(tmp_path, "versions")["status"] == "passed"
    child = int((tmp_path / "out" / "02-sleep" / "child").read_text())
    deadline = time.monotonic() + 30
    while Path(f"/proc/{child}/environ").exists() and Path(f"/proc/{child}/stat").read_text().split()[2] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.slow
def test_exit_codes_of_good_runs_and_of_mistakes(tmp_path):
    assert run(tmp_path, "--stage", "1", "--stage", "attention").returncode == 0
    wrong = run(tmp_path, "--stage", "speed")
    assert wrong.returncode == 1 and wrong.stderr.startswith(
        "error: --stage speed: no such stage; choose among 1 versions"
    )
    listed = run(tmp_path, "--list")
    assert len(listed.stdout.splitlines()) == len(check_gpu.STAGES)
    assert "--toy" in run(tmp_path, "--device", "cpu").stderr


def step(number: int, difference: float) -> dict:
    return {
        "step": number,
        "rollout/logprob_abs_diff": difference,
        "rollout/logprob_abs_diff_max": 0.5,
        "timing_s/step": 1.0,
    }


def test_engine_and_trainer_must_agree_in_every_step():
    good = [{"step": 0}, step(1, 0.001), step(2, 0.029)]
    assert training.agreement(good, 2)["logprob_abs_diff"] == [0.001, 0.029]
    with pytest.raises(Failed, match="step 2: engine and trainer differ by 0.03 nats"):
        training.agreement([step(1, 0.001), step(2, 0.03)], 2)
    with pytest.raises(Failed, match="differ by nan"):
        training.agreement([step(1, float("nan"))], 1)
    with pytest.raises(Failed, match=r"holds the steps \[1\], not 1 to 2"):
        training.agreement([step(1, 0.001)], 2)


def test_a_resumed_run_must_have_the_same_numbers():
    def made(reward: float, lr: float = 0.1) -> dict:
        scores = {"critic/score/mean": reward, "response_length/mean": 10.0, "actor/lr": lr}
        return {"step": 1, "timing_s/step": reward} | scores

    assert training.compare_runs([made(0.5)], [made(0.5)], False, 1).figures["different"] == []
    with pytest.raises(Failed, match="the runs differ: critic/score/mean"):
        training.compare_runs([made(0.5)], [made(0.51)], False, 1)
    # A GPU gives the last bits differently, but not the schedule.
    assert training.compare_runs([made(0.5)], [made(0.51)], True, 1).figures["different"] == ["critic/score/mean"]
    with pytest.raises(Failed, match="the runs differ: actor/lr"):
        training.compare_runs([made(0.5)], [made(0.5, lr=0.2)], True, 1)
    with pytest.raises(Failed, match="scores by 0.40"):
        training.compare_runs([made(0.5)], [made(0.9)], True, 1)


def test_every_test_that_a_stage_names_is_there():
    for chosen in testing.TESTS.values():
        for node in (*chosen[0], *chosen[1]):
            path, _, name = node.partition("::")
            assert f"def {name.partition('[')[0]}" in (ROOT / path).read_text()


@pytest.mark.nightly
@pytest.mark.parametrize("name", [stage.name for stage in check_gpu.STAGES])
def test_every_stage_at_toy_size(name: str, tmp_path):
    arguments = ["--device", "cpu", "--toy", "--stage", name, "--out", str(tmp_path)]
    code = check_gpu.main(arguments)
    (path,) = tmp_path.glob("*.json")
    found = json.loads(path.read_text())
    assert code == 0, found["reason"]
    # The one stage that a CPU does not have says so.
    assert found["status"] == ("skipped" if name == "capture-second-runner" else "passed")
