import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import scoring

from verl.config.rewards import RewardScoreConfig
from verl.rewards.pool import VerifierPool
from verl.rewards.registry import VERIFIERS
from verl.verifiers.verdict import Verdict

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
TIME_LIMIT_S = 1.5
HANG_S = 600
"""What a response takes that hangs in Python; the bounds on times below only tell it from a killed one."""

MISBEHAVING = r'''
import os
import time
from pathlib import Path

from verl.verifiers.verdict import Verdict


def misbehave(solution, ground_truth, extra_info=None, quick=False):
    """Does what the response asks for; extra_info names a file that gets the process id, and where to do it."""
    if quick and not (extra_info or {}).get("when_quick"):
        return None
    if extra_info and "pid_file" in extra_info:
        Path(extra_info["pid_file"]).write_text(str(os.getpid()))
    if solution == "hang":
        time.sleep(HANG_S)
    if solution == "hang in C":
        10 ** (10 ** 10)
    if solution == "eat memory":
        bytearray(2**40)
    if solution == "die":
        os.kill(os.getpid(), 9)
    if solution == "recurse":
        misbehave_for_ever()
    if solution == "bug":
        raise KeyError("bug")
    return Verdict(solution == ground_truth, False, "exact" if solution == ground_truth else "different", solution)


def misbehave_for_ever():
    misbehave_for_ever()
'''


def config(mode: str = "independent", num_workers: int = 1, timeout_s: float = TIME_LIMIT_S) -> RewardScoreConfig:
    return scoring(mode=mode, num_workers=num_workers, timeout_s=timeout_s, memory_limit_mb=512)


@pytest.fixture(scope="module")
def misbehaving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a module whose verifier, under the data source "misbehaving", does what the response says."""
    folder = tmp_path_factory.mktemp("verifiers")
    (folder / "misbehaving_verifier.py").write_text(MISBEHAVING.replace("HANG_S", str(HANG_S)))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        patch.setitem(VERIFIERS, "misbehaving", "misbehaving_verifier:misbehave")
        yield folder


@pytest.fixture(scope="module")
def pool(misbehaving: Path) -> Iterator[VerifierPool]:
    with VerifierPool(config()) as pool:
        pool.score_batch(["math"], ["5"], ["5"])
        yield pool


def score_one(pool: VerifierPool, solution: str, truth: str = r"\frac{1}{2}", source: str = "math") -> Verdict:
    return pool.score_batch([source], [solution], [truth])[0]


def eventually(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def is_alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def test_scores_come_in_order(pool: VerifierPool):
    sources = ["math", "arithmetic", "openai/gsm8k", "math"]
    solutions = [r"\boxed{x+1}", "12", r"\boxed{13}", "none"]
    scores = pool.score_batch(sources, solutions, ["1+x", "12", "12", "12"], [None, {}, {"index": 2}, None])
    assert scores == [
        Verdict(True, True, "equivalent", "x+1", 1.0),
        Verdict(True, False, "exact", "12", 0.5),
        Verdict(False, True, "different", "13", -0.5),
        Verdict(False, False, "missing", "", -1.0),
    ]
    assert pool.score_batch([], [], []) == []


def test_response_may_begin_in_an_open_thought(pool: VerifierPool):
    solutions = [r"\boxed{5}", r"so \boxed{5}</think> \boxed{5}", r"\boxed{4}</think> \boxed{5}"]
    for opened, correct in ((False, [True, True, True]), (True, [False, True, True])):
        scores = pool.score_batch(["math"] * 3, solutions, ["5"] * 3, None, [opened] * 3)
        assert [score.correct for score in scores] == correct


def test_hostile_values_are_refused_before_they_are_sent(pool: VerifierPool):
    deep: list[Any] = []
    for _ in range(10**5):
        deep = [deep]
    refused = [
        (["1"] * 10**6, None, "has 1000000 answers; give 1 to 64"),
        (deep, None, "ground_truth is nested more than 32 levels deep"),
        ("12", {"deep": deep}, "extra_info is nested more than 32 levels deep"),
    ]
    for truth, info, message in refused:
        with pytest.raises(ValueError, match=message):
            pool.submit_batch(["math"] * 2, ["12"] * 2, ["12", truth], [None, info])
    assert pool.score_batch(["math"], ["12"], ["12"], [{"long": list(range(10**6))}])[0].correct


def test_typical_batch_is_fast(pool: VerifierPool):
    solutions = ["1+2+0=03 " * 10 + rf"\boxed{{{i}}}" for i in range(384)]
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        scores = pool.score_batch(["arithmetic"] * 384, solutions, ["7"] * 384)
        seconds.append(time.perf_counter() - start)
        assert [i for i, score in enumerate(scores) if score.correct] == [7]
    # 0.01 s on one core of a server; the bound and the three attempts leave room for a busy laptop.
    assert min(seconds) < 0.5


def test_misbehaving_response_costs_itself_alone(pool: VerifierPool, tmp_path: Path):
    solutions = ["7", "hang", "7", "hang in C", "eat memory", "die", "recurse", "8"]
    pid_file = tmp_path / "pid"
    infos = [{"pid_file": str(pid_file)} if solution == "hang" else None for solution in solutions]
    start = time.perf_counter()
    scores = pool.score_batch(["misbehaving"] * 8, solutions, ["7"] * 8, infos)
    reasons = ["exact", "timeout", "exact", "timeout", "memory", "crash", "crash", "different"]
    assert [score.reason for score in scores] == reasons
    assert [score.score for score in scores] == [0.5, -1.0, 0.5, -1.0, -1.0, -1.0, -1.0, -1.0]
    assert time.perf_counter() - start < HANG_S / 10
    assert eventually(lambda: not is_alive(int(pid_file.read_text())))
    assert score_one(pool, "7", "7", "misbehaving").correct


def test_verifier_that_misbehaves_in_the_quick_pass(pool: VerifierPool):
    solutions, infos = ["7", "hang", "7", "die", "eat memory", "7"], [{"when_quick": True}] * 6
    scores = pool.score_batch(["misbehaving"] * 6, solutions, ["7"] * 6, infos)
    assert [score.correct for score in scores] == [True, False, True, False, False, True]


def test_bug_in_a_verifier_is_raised(pool: VerifierPool):
    with pytest.raises(KeyError, match="bug"):
        score_one(pool, "bug", "7", "misbehaving")
    assert score_one(pool, "7", "7", "misbehaving").correct


def test_submit_batch_does_not_wait(pool: VerifierPool):
    start = time.perf_counter()
    pending = pool.submit_batch(["misbehaving"], ["hang"], ["7"])
    assert time.perf_counter() - start < TIME_LIMIT_S / 2
    assert not pending.done()
    assert pending.result()[0].reason == "timeout"
    assert pending.done()


def test_wrong_arguments(pool: VerifierPool):
    with pytest.raises(ValueError, match="data_source='nowhere': must be one of"):
        pool.submit_batch(["nowhere"], ["5"], ["5"])
    with pytest.raises(ValueError, match=r"batch=\[1, 2, 1, 2, 2, 2\]"):
        pool.submit_batch(["math"], ["5", "6"], ["5"])


def test_close_ends_the_processes(misbehaving: Path, tmp_path: Path):
    pid_file = tmp_path / "pid"
    pool = VerifierPool(config(timeout_s=HANG_S))
    pending = pool.submit_batch(["misbehaving"], ["hang"], ["7"], [{"pid_file": str(pid_file)}])
    assert eventually(pid_file.exists, 60)
    pool.close()
    assert eventually(lambda: not is_alive(int(pid_file.read_text())))
    with pytest.raises(RuntimeError, match="the pool of verifier processes is closed"):
        pending.result()
    with pytest.raises(RuntimeError, match="the pool of verifier processes is closed"):
        pool.submit_batch(["math"], ["5"], ["5"])
    pool.close()


@pytest.mark.skipif(sys.platform != "linux", reason="relies on prctl")
def test_processes_do_not_outlive_a_killed_parent(misbehaving: Path, tmp_path: Path):
    pid_file = tmp_path / "pid"
    script = tmp_path / "parent.py"
    script.write_text(
        textwrap.dedent(f"""
        from verl.config import PPOConfig, load_config
        from verl.rewards.registry import VERIFIERS
        from verl.rewards.pool import VerifierPool

        if __name__ == "__main__":
            VERIFIERS["misbehaving"] = "misbehaving_verifier:misbehave"
            options = ["reward_score.num_workers=1", "reward_score.timeout_s=600"]
            pool = VerifierPool(load_config(PPOConfig, "ppo_trainer", options).reward_score)
            pool.score_batch(["misbehaving"], ["hang in C"], ["7"], [{{"pid_file": {str(pid_file)!r}}}])
        """)
    )
    path = os.pathsep.join([str(ROOT), str(misbehaving)])
    parent = subprocess.Popen([sys.executable, str(script)], env={**os.environ, "PYTHONPATH": path})
    try:
        assert eventually(lambda: pid_file.exists() and pid_file.read_text() != "", 120)
        worker = int(pid_file.read_text())
        assert is_alive(worker)
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    assert eventually(lambda: not is_alive(worker))


@pytest.mark.parametrize(("cores", "busy", "processes"), [(2, 2, 1), (2, 1, 1), (64, 8, 32), (24, 8, 16)])
def test_processes_take_the_cores_that_workers_leave(cores, busy, processes, monkeypatch):
    monkeypatch.setattr("verl.utils.process_pool.available_cores", lambda: cores)
    assert VerifierPool(scoring(num_workers=0), busy).num_processes == processes
    assert VerifierPool(scoring(num_workers=3), busy).num_processes == 3
