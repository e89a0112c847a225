import json
import os
import subprocess
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import verl
from verl.run.tracking import Tracker, drop_records, git_revision, set_aside_records, steps_done, write_summary


@dataclass(frozen=True)
class Inner:
    betas: list[float]


@dataclass(frozen=True)
class Config:
    seed: int
    optim: Inner


CONFIG = Config(seed=7, optim=Inner(betas=[0.9, 0.99]))


def make_tracker(folder: Path, loggers: list[str], last_step: int | None = None) -> Tracker:
    return Tracker(folder, loggers, "project", "experiment", CONFIG, last_step)


def logged(folder: Path, name: str) -> list[tuple[int, float]]:
    """Step and value of what TensorBoard shows of a metric."""
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def test_every_step_is_one_complete_line_in_sorted_order(tmp_path: Path):
    folder = tmp_path / "new" / "run"
    tracker = make_tracker(folder, ["console"])
    tracker.log(0, {"val/pass@1": 0.5})
    tracker.log(1, {"score/mean": -0.25, "actor/lr": 1e-6, "cal/overall/layer_1/Effective Rank/mean": 12.5})
    tracker.log(2, {"a": float("nan"), "b": float("inf"), "c": 1.0})
    # Read before closing: a run that is killed keeps every step it finished.
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    tracker.close()
    assert lines == [
        '{"step": 0, "val/pass@1": 0.5}',
        '{"step": 1, "actor/lr": 1e-06, "cal/overall/layer_1/Effective Rank/mean": 12.5, "score/mean": -0.25}',
        '{"step": 2, "a": null, "b": null, "c": 1.0}',
    ]
    assert sorted(path.name for path in folder.iterdir()) == ["config.yaml", "metrics.jsonl"]
    values = yaml.safe_load((folder / "config.yaml").read_text())
    assert values == asdict(CONFIG) == {"seed": 7, "optim": {"betas": [0.9, 0.99]}}


def test_a_record_is_on_the_disk_before_a_checkpoint_follows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tracker = make_tracker(tmp_path, [])
    on_disk: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda handle: on_disk.append(os.fstat(handle).st_size))
    tracker.log(1, {"a": 1.0})
    tracker.close()
    assert on_disk == [len('{"step": 1, "a": 1.0}\n')]


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """The folder of a run that was killed while it recorded step 4."""
    tracker = make_tracker(tmp_path, ["tensorboard"])
    for step in range(4):
        tracker.log(step, {"a": float(step)})
    tracker.close()
    write_summary(tmp_path, {})
    (tmp_path / "wandb_id.txt").write_text("abc")
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "a"')
    return tmp_path


@pytest.mark.slow
def test_opening_a_tracker_deletes_nothing_and_a_resumed_run_what_it_will_record_again(recorded: Path):
    before = {path.name: path.read_bytes() for path in recorded.iterdir() if path.is_file()}
    make_tracker(recorded, []).close()
    assert {path.name: path.read_bytes() for path in recorded.iterdir() if path.is_file()} == before
    assert logged(recorded, "a") == [(0, 0.0), (1, 1.0), (2, 2.0), (3, 3.0)]
    drop_records(recorded, 2)
    resumed = make_tracker(recorded, ["tensorboard"], last_step=2)
    resumed.log(3, {"a": 30.0})
    resumed.close()
    lines = (recorded / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [{"step": i, "a": a} for i, a in enumerate([0.0, 1.0, 2.0, 30.0])]
    assert logged(recorded, "a") == [(0, 0.0), (1, 1.0), (2, 2.0), (3, 30.0)]
    assert (recorded / "wandb_id.txt").exists() and not (recorded / "summary.json").exists()
    # One that starts again drops everything, but for records that a run without checkpoints leaves.
    (recorded / "metrics.jsonl").write_text("\n".join(lines))
    set_aside_records(recorded)
    set_aside_records(recorded)
    drop_records(recorded, None)
    assert {path.name for path in recorded.iterdir()} == {"config.yaml", "metrics.jsonl.1"}
    assert (recorded / "metrics.jsonl.1").read_text() == "\n".join(lines)


DAMAGED_LINES = [b"\xff\xfe", b"[1]", b'{"step": true}', b"7" * 5000, b"[" * 9999]


@pytest.mark.parametrize("bad", DAMAGED_LINES, ids=lambda line: repr(line[:16]))
def test_damaged_records_cost_a_warning_and_none_is_lost(bad: bytes, tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    good = [b'{"step": 1, "a": null}', b'{"step": 2, "a": "\xe2\x80\xa8"}']
    whole = b"\n".join([good[0], bad, good[1], b'{"step": 3}', b'{"step": 4, "a'])
    for copy in ("metrics.jsonl.damaged", "metrics.jsonl.damaged_2"):
        path.write_bytes(whole)
        (note,) = drop_records(tmp_path, 2)
        assert note == f"{path}: lines of it are damaged; the others are kept, and {copy} is what it was"
        assert path.read_bytes() == b"".join(line + b"\n" for line in good)
        assert (tmp_path / copy).read_bytes() == whole
    # A last line that was cut is what a kill leaves; one that only lacks its line break is whole.
    path.write_bytes(good[0] + b"\n" + good[1])
    assert drop_records(tmp_path, 2) == [] and path.read_bytes() == b"".join(line + b"\n" for line in good)


@pytest.mark.parametrize(("text", "steps"), [('{"steps": 7}', 7), ("", 0), ("{", 0), ("[]", 0), ('{"steps": "7"}', 0)])
def test_steps_of_a_summary_that_may_be_damaged(text: str, steps: int, tmp_path: Path):
    (tmp_path / "summary.json").write_text(text)
    assert steps_done(tmp_path / "summary.json") == steps


@pytest.mark.slow
def test_the_git_revision_is_that_of_the_packages_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    repository = tmp_path / "repository"
    (repository / "verl").mkdir(parents=True)
    source = repository / "verl" / "__init__.py"
    monkeypatch.setattr(verl, "__file__", str(source))
    # Git looks for a repository in the parents too; pytest's own folder may lie in one.
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    assert git_revision() is None

    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.com", "-c", "commit.gpgsign=false"]
        command = ["git", "-C", str(repository), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    source.write_text("a = 1\n")
    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "first")
    assert git_revision() == git("rev-parse", "HEAD")
    source.write_text("a = 2\n")
    assert git_revision() == git("rev-parse", "HEAD") + "-dirty"


@pytest.mark.slow
def test_wandb_writes_its_run_into_the_runs_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    tracker = make_tracker(tmp_path, ["wandb"])
    tracker.log(1, {"score/mean": 0.25})
    tracker.close()
    identity = (tmp_path / "wandb_id.txt").read_text()
    (record,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    # A process of wandb's own writes the file, and may still do so when the run is closed.
    deadline = time.monotonic() + 30
    while b"score/mean" not in (content := record.read_bytes()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert all(text in content for text in (b"score/mean", b"project", b"experiment", b"betas"))
    # The same run there when this one is resumed.
    assert identity.strip().encode() in content
    make_tracker(tmp_path, ["wandb"], last_step=1).close()
    assert (tmp_path / "wandb_id.txt").read_text() == identity
