"""Evaluations with real engines: Ray, vLLM on the CPU, the tiny model."""

import json
import shutil
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT

from tests.e2e.runs import RAY_AGENTS, Evaluation
from verl.data.arithmetic import ArithmeticTask

pytestmark = pytest.mark.slow

PROBLEMS, N, LENGTH = 20, 8, 48

MODEL = ROOT / "data" / "tiny_model"
"""It is right now and then."""


@pytest.fixture(scope="module")
def benchmarks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of one benchmark, ``sums``."""
    folder = tmp_path_factory.mktemp("benchmarks")
    rows = [{"problem": p.question, "answer": p.answer} for p in ArithmeticTask().split("test", PROBLEMS, seed=0)]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def overrides(model: Path, benchmarks: Path, folder: Path) -> list[str]:
    return [
        *("evaluation=embedded", f"model.path={model}", f"model.max_response_length={LENGTH}", "device=cpu"),
        *("benchmarks=sums", f"n_sampling={N}", f"data.benchmark_dir={benchmarks}", "reward_score.num_workers=1"),
        *(f"trainer.default_local_dir={folder}", "trainer.n_gpus_per_node=1", "rollout.kv_cache_memory_mb=32"),
        # Few at a time, so that there is a middle in which it can be killed.
        *("rollout.max_num_seqs=2", "rollout.max_num_batched_tokens=64"),
    ]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


def outcome(folder: Path) -> tuple[dict[tuple[int, int], dict[str, Any]], str, list[Any]]:
    """Samples by their place, the metrics, and the result's problems."""
    (task,) = folder.glob("*/step_*/sums/T1")
    samples = lines(task / "samples.jsonl")
    counts = Counter((sample["problem"], sample["sample"]) for sample in samples)
    assert set(counts.values()) == {1} and len(counts) == PROBLEMS * N
    by_place = {(sample["problem"], sample["sample"]): sample for sample in samples}
    return by_place, (folder / "metrics.jsonl").read_text(), json.loads((task / "results.json").read_text())["problems"]


@pytest.fixture(scope="module")
def whole(benchmarks: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an evaluation that nothing interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    run = Evaluation.complete(overrides(MODEL, benchmarks, folder / "out"), folder / "log")
    assert run.survivors(RAY_AGENTS) == []
    assert "pass@8" in run.log.read_text() and "tok/s" in run.log.read_text()
    assert (folder / "out" / "index.html").is_file()
    return folder / "out"


def test_complete_evaluation_has_samples_and_results(whole):
    samples, metrics, problems = outcome(whole)
    assert len({sample["response"] for sample in samples.values()}) > PROBLEMS
    assert [problem["samples"] for problem in problems] == [N] * PROBLEMS
    (figures,) = map(json.loads, metrics.splitlines())
    right = sum(problem["correct"] for problem in problems) / (PROBLEMS * N)
    assert 0 < right < 1 and figures["tiny_model/sums/pass@1"] == pytest.approx(right)


@pytest.mark.nightly
@pytest.mark.parametrize("killed", [False, True], ids=["cut", "killed"])
def test_evaluation_resumes_and_generates_nothing_twice(killed: bool, benchmarks, whole, tmp_path):
    folder = tmp_path / "out"

    def samples() -> list[Path]:
        return list(folder.glob("*/step_0/sums/T1/samples.jsonl"))

    if killed:
        run = Evaluation(overrides(MODEL, benchmarks, folder), tmp_path / "first.log")
        run.wait_until(lambda: any(p.read_bytes().count(b"\n") >= PROBLEMS * N // 4 for p in samples()), timeout_s=120)
        run.process.send_signal(signal.SIGKILL)
        run.finish()
        (path,) = samples()
    else:  # what a kill would have left
        shutil.copytree(whole, folder)
        (path,) = samples()
        path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[: PROBLEMS * N // 2]))
        (path.parent / "results.json").unlink()
        (folder / "metrics.jsonl").unlink()
    kept = path.read_bytes()
    count = kept.count(b"\n")
    assert PROBLEMS * N // 4 <= count < PROBLEMS * N
    assert not (folder / "metrics.jsonl").exists()

    # At once, while processes of the first one are still ending, and with a line cut as by a kill during a write.
    path.write_bytes(kept[:-20])
    again = Evaluation.complete(overrides(MODEL, benchmarks, folder), tmp_path / "second.log")
    assert f"{count - 1} of {PROBLEMS * N} samples already exist" in again.log.read_text()
    assert again.survivors(RAY_AGENTS) == [] and (not killed or run.survivors(RAY_AGENTS) == [])
    # The samples of the first one are unchanged, and the others follow them.
    complete = kept[: kept[:-20].rfind(b"\n") + 1]
    assert path.read_bytes().startswith(complete)
    assert outcome(folder) == outcome(whole)


@pytest.mark.nightly
def test_tensor_parallel_engine_and_rank_metrics(benchmarks, whole, tmp_path):
    command = overrides(MODEL, benchmarks, tmp_path / "out")
    options = ["rollout.tensor_parallel_size=2", "trainer.n_gpus_per_node=2", "calculator.enable=true"]
    options += ["calculator.diff_stride=4", "calculator.layers=[0,-1]"]
    run = Evaluation.complete([*command, *options], tmp_path / "log")
    samples, metrics, _ = outcome(tmp_path / "out")
    names = {f"layer_{i}/Effective Rank{order}" for i in (1, 2) for order in ("", " diff", " diff 2")}
    assert all(set(sample["metrics"]) == names for sample in samples.values())
    assert all(1 <= sample["metrics"]["layer_2/Effective Rank"] <= LENGTH for sample in samples.values())
    assert "sums/layer_2/Effective Rank diff/all/mean" in metrics
    # An engine of two workers samples as one of one does; sums over halves round differently, rarely visibly.
    alike = sum(sample["response"] == outcome(whole)[0][place]["response"] for place, sample in samples.items())
    assert alike >= 0.95 * len(samples)
    run.assert_no_shared_memory()


@pytest.mark.nightly
def test_reward_model_reranks(reward_model, benchmarks, whole, tmp_path):
    shutil.copytree(whole, tmp_path / "out")
    command = [*overrides(MODEL, benchmarks, tmp_path / "out"), f"reward_model.path={reward_model}"]
    command.append("reward_model.max_length=512")
    run = Evaluation.complete(command, tmp_path / "log")
    assert f"the reward model reads {PROBLEMS * N} responses" in run.log.read_text()
    (task,) = (tmp_path / "out").glob("*/step_0/sums/T1")
    scores = [line["score"] for line in lines(task / "reward_model.jsonl")[1:]]
    assert len(scores) == PROBLEMS * N and len(set(scores)) > PROBLEMS
    figures = json.loads((task / "results.json").read_text())["figures"]
    assert figures["rm@1"] == pytest.approx(figures["pass@1"])
    assert 0 <= figures["rm_at_k"]["8"]["low"] <= figures["rm_at_k"]["8"]["high"] <= 1
    # Its score of a response does not depend on what it is read with.
    options = ["reward_model.max_length=511", "reward_model.micro_batch_size=3", "trainer.n_gpus_per_node=2"]
    Evaluation.complete([*command[:-1], *options], tmp_path / "log2")
    again = [line["score"] for line in lines(task / "reward_model.jsonl")[1:]]
    assert again == pytest.approx(scores, abs=1e-4)
