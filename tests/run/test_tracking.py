"""Records and trackers. mlflow and swanlab are stand-ins that write down what they are told; wandb is the real one."""

import json
import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from verl.config.errors import ConfigError
from verl.run import tracker_backends
from verl.run.tracker_backends import BACKENDS, RunInfo, check_trackers
from verl.run.tracking import Tracker, drop_records, set_aside_records, steps_done, write_summary


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
    assert sorted(path.name for path in folder.iterdir()) == ["config.yaml", "metrics.jsonl", "start.json"]
    start = json.loads((folder / "start.json").read_text())
    assert start["overrides"] == sys.argv[1:] and start["host"] == platform.node()
    assert abs(datetime.fromisoformat(start["started"]).timestamp() - time.time()) < 600
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
def test_resumed_tracker_drops_what_it_records_again(recorded: Path):

    def records() -> dict[str, bytes]:
        files = {path.name: path for path in recorded.iterdir() if path.is_file() and path.name != "start.json"}
        return {name: path.read_bytes() for name, path in files.items()}

    before = records()
    make_tracker(recorded, []).close()
    assert records() == before
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
    assert {path.name for path in recorded.iterdir()} == {"config.yaml", "metrics.jsonl.1", "start.json"}
    assert (recorded / "metrics.jsonl.1").read_text() == "\n".join(lines)


def test_a_full_disk_is_an_error_that_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    if not Path("/dev/full").exists():
        pytest.skip("only Linux has a device that is always full")
    monkeypatch.setattr("verl.run.tracker_backends.open_to_write", lambda path, flags: os.open("/dev/full", flags))
    tracker = make_tracker(tmp_path, [])
    with pytest.raises(OSError, match=r"No space left on device: '.*/metrics\.jsonl'"):
        tracker.log(1, {"a": 1.0})
    tracker.close()  # what was not written does not come again


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
def test_wandb_writes_its_run_into_the_runs_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd):
    monkeypatch.setenv("WANDB_MODE", "offline")
    check_trackers(["wandb"])
    tracker = make_tracker(tmp_path, ["wandb"])
    tracker.log(1, {"score/mean": 0.25})
    tracker.close()
    # Where to find the run, and not a line for each metric.
    shown = capfd.readouterr().err
    assert "Run data is saved locally" in shown and "score/mean" not in shown
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


class StandIn(ModuleType):
    """A package that records which functions are called, with positional arguments and then those by name."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None, origin=name)
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, function: str) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            self.calls.append((function, *arguments, *([named] if named else [])))
            return SimpleNamespace(info=SimpleNamespace(run_id="abc123"))

        return call


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], StandIn]:
    def install(name: str) -> StandIn:
        for variable in ("MLFLOW_TRACKING_URI", "MLFLOW_RUN_ID", "SWANLAB_API_KEY", "SWANLAB_MODE", "SWANLAB_LOG_DIR"):
            monkeypatch.delenv(variable, raising=False)
        monkeypatch.setitem(sys.modules, name, package := StandIn(name))
        return package

    return install


def run_info(folder: Path, last_step: int | None = None) -> RunInfo:
    return RunInfo(folder, "project", "experiment", {"seed": 7, "optim": {"betas": [0.9, 0.99]}}, last_step)


def test_mlflow_gets_options_once_and_every_step(tmp_path: Path, stand_in):
    mlflow = stand_in("mlflow")
    check_trackers(["mlflow"])
    backend = BACKENDS["mlflow"](run_info(tmp_path))
    backend.log(3, {"val/pass@1": 0.5, "cal/layer_1/Effective Rank diff 2/mean": 0.75, "a(b)": 1.0, "a": float("nan")})
    backend.close()
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    finite = {"val/pass_at_1": 0.5, "cal/layer_1/Effective Rank diff 2/mean": 0.75, "a_b_": 1.0}
    assert mlflow.calls == [
        ("set_tracking_uri", uri),
        ("set_experiment", "project"),
        ("start_run", {"run_name": "experiment"}),
        ("log_params", {"seed": "7", "optim.betas": "[0.9, 0.99]"}),
        ("log_metrics", finite, {"step": 3}),
        ("end_run",),
    ]
    mlflow.calls.clear()
    BACKENDS["mlflow"](run_info(tmp_path, last_step=3))
    assert mlflow.calls == [("set_tracking_uri", uri), ("start_run", {"run_id": "abc123"})]


def test_swanlab_gets_every_step(tmp_path: Path, stand_in, monkeypatch):
    swanlab = stand_in("swanlab")
    monkeypatch.setenv("SWANLAB_SAVE_DIR", str(tmp_path))
    message = r"^trainer.logger='swanlab': not logged in; run `swanlab login`, set SWANLAB_"
    with pytest.raises(ConfigError, match=message):
        check_trackers(["swanlab"])
    (tmp_path / ".netrc").touch()
    check_trackers(["swanlab"])
    (tmp_path / ".netrc").unlink()
    for name, value in (("SWANLAB_MODE", "local"), ("SWANLAB_API_KEY", "key")):
        monkeypatch.setenv(name, value)
        check_trackers(["swanlab"])
    backend = BACKENDS["swanlab"](run_info(tmp_path))
    backend.log(2, {"a": 1.5, "b": float("inf")})
    backend.close()
    opened = {"project": "project", "experiment_name": "experiment", "config": run_info(tmp_path).config}
    opened |= {"logdir": str(tmp_path / "swanlog"), "mode": "local"}
    assert swanlab.calls == [("login", "key"), ("init", opened), ("log", {"a": 1.5}, {"step": 2}), ("finish",)]


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "swanlab").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("SWANLAB_API_KEY", "key")
    # A folder of its name is no package.
    with pytest.raises(ConfigError, match="^trainer.logger='swanlab': swanlab is not installed"):
        check_trackers(["swanlab"])
    monkeypatch.setattr(tracker_backends, "find_spec", lambda package: None)
    message = "^trainer.logger='tensorboard': tensorboard is not installed; `pip install tensorboard`"
    with pytest.raises(ConfigError, match=message):
        check_trackers(["console", "file", "tensorboard"])


def test_verls_file_is_written_beside_our_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "logs" / "verl.jsonl"
    monkeypatch.delenv("VERL_FILE_LOGGER_PATH", raising=False)
    BACKENDS["file"](run_info(tmp_path)).log(1, {"a": 1.0})
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(path))
    # Step 2 is done twice: the run resumed from step 1.
    for last_step, step in ((None, 1), (None, 1), (1, 2), (1, 2)):
        backend = BACKENDS["file"](run_info(tmp_path, last_step))
        backend.log(step, {"b": 0.5, "a": float("nan")})
        backend.close()
    # A run from scratch starts the file again, a resumed one goes on.
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"step": step, "data": {"b": 0.5, "a": None}} for step in (1, 2)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({}, "trainer.logger='wandb': not logged in; run `wandb login`, set WANDB_API_KEY, or set WANDB_MODE=offline"),
        ({"WANDB_API_KEY": "0123456789" * 4}, ""),
    ],
)
def test_wandb_without_a_key_is_refused(environment: dict[str, str], message: str, tmp_path: Path):
    kept = {name: value for name, value in os.environ.items() if "WANDB" not in name}
    command = [sys.executable, "-c", "from verl.run.tracker_backends import check_trackers; check_trackers(['wandb'])"]
    # Neither a .netrc nor settings of the user's.
    environment |= {"HOME": str(tmp_path), "WANDB_CONFIG_DIR": str(tmp_path)}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path)}
    with socket.create_server(("127.0.0.1", 0)) as server:
        # It would keep whoever asks it waiting.
        environment |= {"WANDB_BASE_URL": f"http://127.0.0.1:{server.getsockname()[1]}"}
        result = subprocess.run(
            command, env=kept | environment, cwd=tmp_path, capture_output=True, text=True, check=False
        )
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()
    assert (result.returncode != 0) == bool(message) and message in result.stderr
