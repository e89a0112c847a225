"""Trackers. mlflow and swanlab are stand-ins that write down what they are told; wandb is the real client."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from verl.config.errors import ConfigError
from verl.run import sinks
from verl.run.sinks import SINKS, RunInfo, check_trackers

STAND_INS = {
    "mlflow": """
calls = []
class Run:
    class info:
        run_id = "abc123"
def set_tracking_uri(uri): calls.append(("set_tracking_uri", uri))
def set_experiment(name): calls.append(("set_experiment", name))
def start_run(run_id=None, run_name=None): calls.append(("start_run", run_id, run_name)); return Run
def log_params(params): calls.append(("log_params", params))
def log_metrics(metrics, step): calls.append(("log_metrics", metrics, step))
def end_run(): calls.append(("end_run",))
""",
    "swanlab": """
calls = []
def login(api_key): calls.append(("login", api_key))
def init(project, experiment_name, config, logdir, mode): calls.append(("init", project, experiment_name, logdir, mode))
def log(data, step): calls.append(("log", data, step))
def finish(): calls.append(("finish",))
""",
}


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    def install(name: str) -> ModuleType:
        for variable in ("MLFLOW_TRACKING_URI", "MLFLOW_RUN_ID", "SWANLAB_API_KEY", "SWANLAB_MODE", "SWANLAB_LOG_DIR"):
            monkeypatch.delenv(variable, raising=False)
        (tmp_path / "packages").mkdir(exist_ok=True)
        (tmp_path / "packages" / f"{name}.py").write_text(STAND_INS[name])
        monkeypatch.syspath_prepend(str(tmp_path / "packages"))
        sys.modules.pop(name, None)
        return __import__(name)

    yield install
    for name in STAND_INS:
        sys.modules.pop(name, None)


def run_info(folder: Path, last_step: int | None = None) -> RunInfo:
    return RunInfo(folder, "project", "experiment", {"seed": 7, "optim": {"betas": [0.9, 0.99]}}, last_step)


def test_mlflow_gets_options_once_and_every_step(tmp_path: Path, stand_in, monkeypatch):
    mlflow = stand_in("mlflow")
    check_trackers(["mlflow"])
    sink = SINKS["mlflow"](run_info(tmp_path))
    sink.log(3, {"val/pass@1": 0.5, "cal/layer_1/Effective Rank diff 2/mean": 0.75, "a(b)": 1.0, "a": float("nan")})
    sink.close()
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    assert mlflow.calls == [
        ("set_tracking_uri", uri),
        ("set_experiment", "project"),
        ("start_run", None, "experiment"),
        ("log_params", {"seed": "7", "optim.betas": "[0.9, 0.99]"}),
        ("log_metrics", {"val/pass_at_1": 0.5, "cal/layer_1/Effective Rank diff 2/mean": 0.75, "a_b_": 1.0}, 3),
        ("end_run",),
    ]
    mlflow.calls.clear()
    SINKS["mlflow"](run_info(tmp_path, last_step=3))
    assert mlflow.calls == [("set_tracking_uri", uri), ("start_run", "abc123", None)]
    # The server and the run of the environment.
    mlflow.calls.clear()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracking:5000")
    monkeypatch.setenv("MLFLOW_RUN_ID", "given")
    SINKS["mlflow"](run_info(tmp_path / "new"))
    assert mlflow.calls == [("start_run", "given", None)] and not (tmp_path / "new").exists()


def test_swanlab_gets_every_step(tmp_path: Path, stand_in, monkeypatch):
    swanlab = stand_in("swanlab")
    monkeypatch.setenv("SWANLAB_SAVE_DIR", str(tmp_path))
    with pytest.raises(
        ConfigError, match=r"^trainer.logger='swanlab': not logged in; run `swanlab login`, set SWANLAB_"
    ):
        check_trackers(["swanlab"])
    monkeypatch.setenv("SWANLAB_API_KEY", "key")
    check_trackers(["swanlab"])
    SINKS["swanlab"](run_info(tmp_path))
    monkeypatch.delenv("SWANLAB_API_KEY")
    (tmp_path / ".netrc").touch()
    check_trackers(["swanlab"])
    (tmp_path / ".netrc").unlink()
    monkeypatch.setenv("SWANLAB_MODE", "local")
    check_trackers(["swanlab"])
    sink = SINKS["swanlab"](run_info(tmp_path))
    sink.log(2, {"a": 1.5, "b": float("inf")})
    sink.close()
    folder = str(tmp_path / "swanlog")
    assert swanlab.calls == [
        ("login", "key"),
        ("init", "project", "experiment", folder, "cloud"),
        ("init", "project", "experiment", folder, "local"),
        ("log", {"a": 1.5}, 2),
        ("finish",),
    ]


def test_a_folder_of_a_packages_name_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "swanlab").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("SWANLAB_API_KEY", "key")
    with pytest.raises(ConfigError, match="^trainer.logger='swanlab': swanlab is not installed"):
        check_trackers(["swanlab"])


@pytest.mark.parametrize("name", ["wandb", "mlflow", "swanlab", "tensorboard"])
def test_a_missing_package_is_named(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sinks, "find_spec", lambda package: None)
    with pytest.raises(ConfigError, match=rf"^trainer.logger='{name}': {name} is not installed; `pip install {name}`"):
        check_trackers(["console", "file", name])


def test_verls_file_is_written_beside_our_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "logs" / "verl.jsonl"
    monkeypatch.delenv("VERL_FILE_LOGGER_PATH", raising=False)
    SINKS["file"](run_info(tmp_path)).log(1, {"a": 1.0})
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(path))
    # Step 2 is done twice: the run resumed from step 1.
    for last_step, step in ((None, 1), (None, 1), (1, 2), (1, 2)):
        sink = SINKS["file"](run_info(tmp_path, last_step))
        sink.log(step, {"b": 0.5, "a": float("nan")})
        sink.close()
    # A run from scratch starts the file again, a resumed one goes on.
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"step": step, "data": {"b": 0.5, "a": None}} for step in (1, 2)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({}, "trainer.logger='wandb': not logged in; run `wandb login`, set WANDB_API_KEY, or set WANDB_MODE=offline"),
        ({"WANDB_MODE": "offline"}, ""),
        ({"WANDB_API_KEY": "0123456789" * 4}, ""),
    ],
)
def test_wandb_without_a_key_is_refused(environment: dict[str, str], message: str, tmp_path: Path):
    kept = {name: value for name, value in os.environ.items() if "WANDB" not in name}
    command = [sys.executable, "-c", "from verl.run.sinks import check_trackers; check_trackers(['wandb'])"]
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
