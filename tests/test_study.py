"""benchmarks/study.py: the order of its runs, its page on literal figures, and the published studies."""

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import study
import yaml
from bench_report import write_report
from study import runs_of
from study_file import Arm, Study
from study_page import LOGGED, holm, page

GIVEN: dict[str, Any] = {
    "question": "Which is better?",
    "seeds": [3, 1],
    "ks": [1, 2],
    "train": ["rollout.val_kwargs.n=4"],
    "arms": {
        "a": {"overrides": ["experiment=grpo"]},
        "b": {"overrides": ["experiment=verl_grpo"]},
        "c": {"overrides": [], "seeds": [1], "exploratory": True},
    },
    "contrasts": [["b", "a"], ["c", "b"]],
}


def written(folder: Path, **changes: Any) -> Path:
    file = folder / "s.yaml"
    file.write_text(yaml.safe_dump(GIVEN | changes))
    return file


def row(arm: str, seed: int, correct: list[int], **logged: Any) -> dict[str, Any]:
    empty: dict[str, Any] = {name: [] for name in LOGGED} | {"code": "1f2e", "problems": [*range(len(correct))]}
    return {"arm": arm, "seed": seed, "samples": 4, "correct": correct} | empty | {"reward": [0.5]} | logged


def facts(read: Study) -> dict[str, Any]:
    told = {"hardware": "a machine", "date": "2026-11-23", "command": "python"}
    return told | {"study": asdict(read), "plot": "s.svg"}


def test_study_runs_seed_by_seed(tmp_path: Path):
    read = Study.read(written(tmp_path))
    assert read.arms["c"] == Arm([], [1], True) and read.ks == [1, 2]
    runs = runs_of(read, tmp_path)
    assert [(run.arm, run.seed) for run in runs] == [("a", 1), ("b", 1), ("a", 3), ("b", 3), ("c", 1)]
    assert runs[1].folder == tmp_path / "b/seed_1"
    assert runs[1].options == ["rollout.val_kwargs.n=4", "experiment=verl_grpo", "seed=1"]


def test_p_values_are_corrected_for_their_number():
    # 4 * 0.01, 3 * 0.02, then 2 * 0.025 = 0.05, which may not be below its predecessor, and 0.6.
    assert holm([0.02, 0.6, 0.01, 0.025]) == pytest.approx([0.06, 0.6, 0.04, 0.06])
    assert holm([0.4, 0.5]) == pytest.approx([0.8, 0.8]) and holm([0.9, 0.9]) == [1.0, 1.0] and holm([]) == []


def test_page_compares_arms_with_shared_seeds(tmp_path: Path):
    read = Study.read(written(tmp_path))
    rows = [row("a", 1, [2, 2]), row("a", 3, [1, 3]), row("b", 1, [3, 3]), row("b", 3, [2, 3])]
    rows.append(row("c", 1, [2, 2], shaped_share=[0.2, 0.4], shaped_change=[0.01, 0.03], entropy=[0.5]))
    text = page(facts(read), rows)
    assert "Incomplete" not in text and "1 of 5 runs are missing" in page(facts(read), rows[1:])
    assert "different code" not in text and "different code" in page(facts(read), [*rows[:4], rows[4] | {"code": "2"}])
    # Over seeds, the problems have 0.375 and 0.625 in a, 0.625 and 0.75 in b. pass@2 of 1, 2 and 3 of 4 is 1/2, 5/6, 1.
    assert "| a | 2 | 50.0% (37.5% to 62.5%) | 0.0 | 79.2%" in text
    assert "| b | 2 | 68.8% (62.5% to 75.0%) | 8.8 |" in text
    assert "| c (exploratory) | 1 | 50.0% (50.0% to 50.0%) |  |" in text
    # Differences of seeds 0.25 and 0.125; t(1) is 12.7062, p is 2 atan(1 / 3) / pi. One contrast needs no correction,
    # and with one degree of freedom it takes 11.55 deviations.
    assert f"| b - a | 2 | +18.8 (-60.7 to +98.2) | {100 * 11.54989 * 0.125 / math.sqrt(2):.1f} | 0.2 | 0.2 |" in text
    assert "| c - b (exploratory) | 1 | -25.0 |  |  |  |" in text and "corrected for the 1 contrasts" in text
    assert "| a | 50.0% |  |  |  |" in text and "| c | 50.0% | 0.5000 | 30.0% | 2.0% |" in text
    # One seed of all arms allows no test.
    alone = page(facts(read), [rows[0], rows[2], rows[3]])
    assert "| b - a | 1 | +25.0 |  |  |  |" in alone and "p is of" not in alone
    with pytest.raises(SystemExit, match="error: b: with seed 3 it had other problems than other arms"):
        page(facts(read), [*rows[:3], rows[3] | {"problems": [0, 2]}])


def test_records_of_others_join(tmp_path: Path):
    theirs = Study.read(written(tmp_path, arms={"b": {"overrides": ["experiment=verl_grpo"]}}, contrasts=[]))
    write_report(tmp_path / "theirs", facts(theirs), [row("b", 1, [3, 3])], lambda *_: "")
    read = Study.read(written(tmp_path, records=["theirs.jsonl"]))
    assert list(study.recorded(read, tmp_path / "s")) == [("b", 1)]
    other = Study.read(written(tmp_path, records=["theirs.jsonl"], train=["rollout.val_kwargs.n=8"]))
    assert not study.recorded(other, tmp_path / "s"), "their runs were made with other options"
    missing = Study.read(written(tmp_path, records=["none.jsonl"]))
    with pytest.raises(SystemExit, match="error: records: .*none.jsonl"):
        study.recorded(missing, tmp_path / "s")


def test_controls_of_published_studies_still_count():
    folder = study.ROOT / "benchmarks/studies"
    studies = {path.stem: Study.read(path) for path in folder.glob("*.yaml")}
    for file, seeds in {"rank_shaping": [0, 1, 2, 3, 4], "pretrained": [0, 1, 2, 3]}.items():
        read = studies[file]
        assert "calculator.shuffle_within_groups=true" in read.arms["shuffled_30"].overrides
        known = study.recorded(read, folder / file)
        assert sorted(seed for arm, seed in known if arm == "shuffled_30") == seeds
        assert {arm for arm, _ in known} == set(read.arms)
