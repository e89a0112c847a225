"""The statistics of scripts/study.py on literal figures, its order, its resumption, and one study of a step."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import study
import yaml
from bench_report import read_report
from study import Arm, Run, Study, compared, page, rates, runs_of

GIVEN: dict[str, Any] = {
    "question": "Which is better?",
    "baseline": "a",
    "seeds": [3, 1],
    "ks": [1, 2],
    "train": ["trainer.total_training_steps=1"],
    "arms": {
        "a": {"overrides": ["experiment=grpo"]},
        "b": {"overrides": ["experiment=verl_grpo"]},
        "c": {"overrides": [], "seeds": [1], "exploratory": True},
    },
}


def written(folder: Path, **changes: Any) -> Path:
    file = folder / "s.yaml"
    file.write_text(yaml.safe_dump(GIVEN | changes))
    return file


def row(arm: str, seed: int, correct: list[int], **logged: list[float]) -> dict[str, Any]:
    empty = {name: list[float]() for name in study.LOGGED}
    return {"arm": arm, "seed": seed, "samples": 4, "correct": correct} | empty | {"reward": [0.5]} | logged


def facts(read: Study) -> dict[str, Any]:
    told = {"hardware": "a machine", "torch": "2", "vllm": "0", "date": "2026-11-23", "command": "python"}
    return told | {"study": study.asdict(read), "plot": "s.svg"}


def test_a_study_is_read_and_its_runs_are_seed_by_seed(tmp_path: Path):
    read = Study.read(written(tmp_path))
    assert read.arms["c"] == Arm([], [1], "a", True) and read.ks == [1, 2]
    runs = runs_of(read, tmp_path)
    assert [(run.arm, run.seed) for run in runs] == [("a", 1), ("b", 1), ("a", 3), ("b", 3), ("c", 1)]
    assert runs[1].folder == tmp_path / "b/seed_1"
    assert runs[1].options == ["trainer.total_training_steps=1", "experiment=verl_grpo", "seed=1"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"baseline": "d"}, "a: baseline='d': must be one of a, b, c"),
        ({"steps": 3}, "unexpected keyword argument 'steps'"),
        ({"arms": None}, "AttributeError"),
        ({"arms": {"a": {"override": []}}}, "unexpected keyword argument 'override'"),
    ],
)
def test_a_wrong_study_is_told_in_one_line(tmp_path: Path, changes: dict[str, Any], message: str):
    with pytest.raises(SystemExit) as raised:
        Study.read(written(tmp_path, **changes))
    assert message in str(raised.value) and "\n" not in str(raised.value)


def test_differences_are_paired_by_seed():
    # Differences 0.02, 0.04 and 0.06: mean 0.04, standard error 0.02 / sqrt(3); t(2) is 4.302653, and 1.060660 for 0.8.
    found = compared({1: 0.52, 2: 0.64, 3: 0.76, 9: 1.0}, {1: 0.5, 2: 0.6, 3: 0.7, 8: 0.0})
    error = 0.02 / math.sqrt(3)
    assert found.difference == pytest.approx(0.04)
    assert found.high - found.difference == pytest.approx(4.302653 * error, rel=1e-6)
    assert found.difference - found.low == pytest.approx(4.302653 * error, rel=1e-6)
    assert found.detectable == pytest.approx((4.302653 + 1.060660) * error, rel=1e-6)
    alone = compared({1: 0.5}, {1: 0.25})
    assert (alone.difference, alone.low, alone.high) == (0.25, -math.inf, math.inf)
    with pytest.raises(ValueError, match="share no seed"):
        compared({1: 0.5}, {2: 0.5})


def test_pass_at_k_of_each_problem():
    found = rates(row("a", 1, [1, 2, 0]), [1, 2])
    assert found.tolist() == [[0.25, 0.5], [0.5, pytest.approx(5 / 6)], [0.0, 0.0]]


def test_the_page_compares_with_the_baseline_where_seeds_are_shared(tmp_path: Path):
    read = Study.read(written(tmp_path))
    rows = [row("a", 1, [2, 2]), row("a", 3, [1, 3]), row("b", 1, [3, 3]), row("b", 3, [2, 4])]
    rows.append(row("c", 1, [2, 2], shaped_share=[0.2, 0.4], shaped_change=[0.01, 0.03], entropy=[0.5]))
    text = page(facts(read), rows)
    assert "Incomplete" not in text and "1 runs are not there" in page(facts(read), rows[1:])
    # The problem means over seeds are 0.375 and 0.625 for a, 0.625 and 0.875 for b; both seeds differ by 0.25.
    assert "| a | 2 | 50.0% | 37.5% to 62.5% |  |  |  |" in text
    assert "| b | 2 | 75.0% | 62.5% to 87.5% | +25.0% | +25.0% to +25.0% | 0.0% |" in text
    assert "| c (exploratory) | 1 | 50.0% | 50.0% to 50.0% | +0.0% | one seed |  |" in text
    assert "| a | 50.0% |  |  |  |" in text and "| c | 50.0% | 0.5000 | 30.0% | 2.0% |" in text


def test_a_complete_run_is_left_and_one_of_other_options_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = Run("a", 1, tmp_path / "a/seed_1", ["seed=1"])
    assert not run.complete

    class Done:
        returncode = 0

    def call(command: list[str], **_: Any) -> Done:
        assert command[3:] == ["seed=1", f"trainer.default_local_dir={run.folder}"]
        assert not run.folder.exists()
        run.folder.mkdir()
        (run.folder / "summary.json").touch()
        return Done()

    monkeypatch.setattr(study.subprocess, "run", call)
    run.folder.mkdir(parents=True)
    (run.folder / "half").touch()
    assert run.train()
    assert run.complete and not (run.folder / "half").exists()
    monkeypatch.setattr(study.subprocess, "run", lambda *_, **__: pytest.fail("was complete"))
    run.train()
    with pytest.raises(SystemExit, match="was made with .'seed=1'., not .'seed=2'."):
        _ = Run("a", 1, run.folder, ["seed=2"]).complete


def test_a_failed_run_names_its_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = Run("a", 1, tmp_path / "a/seed_1", ["no_such_option=1"])
    assert not run.train()
    assert "no_such_option" in run.folder.with_suffix(".log").read_text()
    assert not run.complete
    log = run.folder.with_suffix(".log")
    assert f"error: a with seed=1 ended with exit code 1; see {log}" in capsys.readouterr().err


@pytest.mark.timeout(600)
def test_a_study_of_one_step(tmp_path: Path):
    train = ["model.path=data/tiny_model", "data.train_batch_size=4", "actor.ppo_mini_batch_size=4", "rollout.n=2"]
    train += ["data.val_sample_size=8", "trainer.val_before_train=false", "trainer.report_freq=-1"]
    train += ["trainer.total_training_steps=1", "rollout.val_kwargs.n=2", "rollout.val_kwargs.temperature=1.0"]
    shuffled = ["experiment=verl_grpo", "+algorithm.recompose_kwargs.seed=${seed}"]
    shuffled += ["algorithm.recompose=benchmarks/studies/shuffled.py:Shuffled"]
    arms = {"a": {"overrides": ["experiment=grpo"]}, "b": {"overrides": shuffled}}
    file = written(tmp_path, train=train, seeds=[7], arms=arms)
    study.main([str(file), "--runs", str(tmp_path / "runs")])
    given, rows = read_report(tmp_path / "s.jsonl")
    assert [(found["arm"], found["samples"], len(found["correct"])) for found in rows] == [("a", 2, 8), ("b", 2, 8)]
    assert page(given, rows) == (tmp_path / "s.md").read_text()
    assert "| b | 1 |" in (tmp_path / "s.md").read_text() and "pass@2" in (tmp_path / "s.svg").read_text()
    summary = json.loads((tmp_path / "runs/b/seed_7/summary.json").read_text())
    assert summary and not list((tmp_path / "runs/b/seed_7").glob("global_step_*"))
