import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch

from verl.cluster import start
from verl.cluster.environment import is_secret, passed_variables
from verl.cluster.network import address_towards, reachable
from verl.cluster.ray_head import check_head, cluster_address
from verl.cluster.start import private_folder, resolve_device
from verl.config import ConfigError
from verl.utils.distributed import listening_socket


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """None that this computer may have running."""
    monkeypatch.setenv("RAY_ADDRESS", "local")


def test_unusable_gpu_is_refused(monkeypatch, tmp_path: Path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert [resolve_device(device) for device in ("auto", "cpu", "cuda")] == ["cuda", "cpu", "cuda"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(start, "DEVICE_FILES", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (tmp_path / "nvidiactl").touch()
    assert resolve_device("auto") == "cpu"
    (tmp_path / "nvidia0").touch()
    with pytest.raises(
        ConfigError, match=r"^device='auto': this machine has a GPU \(.*nvidia0\) that torch .* set device=cpu$"
    ):
        resolve_device("auto")
    assert resolve_device("cpu") == "cpu"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert resolve_device("auto") == "cpu"


@pytest.mark.parametrize(
    ("address", "arguments", "line"),
    [
        ("local", ("cuda",), "device='cuda': torch sees no GPU; set device=auto or cpu$"),
        ("local", ("auto", 2), r"trainer.nnodes=2: this machine is alone. Start .* NNODES, NODE_RANK and"),
        ("ray://head:1", ("auto",), "RAY_ADDRESS=ray://head:1: a run is part of the cluster; set it to head:63"),
    ],
)
def test_clusters_and_devices_that_a_run_cannot_use(monkeypatch, address: str, arguments: tuple, line: str):
    monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=f"^{line}"):
        resolve_device(*arguments)


def test_the_store_holds_two_batches_but_not_more_than_there_is(monkeypatch):
    monkeypatch.setattr(start.shutil, "disk_usage", lambda _: SimpleNamespace(free=64 << 30))
    assert start.store_megabytes(0, 0) == 256
    # 128 prompts x 8 responses of 1k + 8k tokens: 144 MiB each way.
    assert start.store_megabytes(1024, 9216) == 288
    assert start.store_megabytes(4096, 33792) == 4224
    monkeypatch.setattr(start.shutil, "disk_usage", lambda _: SimpleNamespace(free=2000 << 20))
    assert start.store_megabytes(4096, 33792) == 1600


@pytest.mark.slow
@pytest.mark.parametrize("slow_starts", [2, 4])
def test_a_cluster_that_starts_slowly_is_started_again(monkeypatch, tmp_path, slow_starts: int):
    folder, started, left = str(tmp_path / "ray"), list[subprocess.Popen[bytes]](), [slow_starts]
    other = subprocess.Popen(["sleep", "60"])

    def init(**options: Any) -> None:
        if left[0]:
            left[0] -= 1
            code = "import time; print(flush=True); time.sleep(60)"
            started.append(subprocess.Popen([sys.executable, "-c", code, folder], stdout=subprocess.PIPE))
            # Its command line can be empty until it runs.
            assert started[-1].stdout and started[-1].stdout.read(1)
            raise Exception("The current node timed out during startup. This could happen because some")

    monkeypatch.setattr(ray, "init", init)
    try:
        if slow_starts == 2:
            start._init_ray(_temp_dir=folder)
        else:
            log = tmp_path / "ray" / "session_latest" / "logs" / "raylet.err"
            log.parent.mkdir(parents=True)
            log.write_text("Traceback\nModuleNotFoundError: No module named 'pydantic'\n")
            line = "within half a minute, 4 times: this machine is too .* ends with: ModuleNotFound.*'pydantic'$"
            with pytest.raises(ConfigError, match=line):
                start._init_ray(_temp_dir=folder)
        # Its processes of the tries that failed are gone; those of others are not.
        assert [process.poll() is None for process in [*started, other]] == [False] * slow_starts + [True]
        assert left == [0]
    finally:
        for process in [*started, other]:
            with process:
                process.kill()


def test_what_reaches_the_workers(monkeypatch: pytest.MonkeyPatch):
    ours = {"NCCL_DEBUG", "HF_TOKEN", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "MY_CACHE", "MY_KEY", "OTHER"}
    for name in ours:
        monkeypatch.setenv(name, "x")
    assert set(passed_variables()) & ours == {"NCCL_DEBUG", "HF_TOKEN", "OMP_NUM_THREADS"}
    assert set(passed_variables(["MY_*"])) & ours == {"NCCL_DEBUG", "HF_TOKEN", "OMP_NUM_THREADS", "MY_CACHE", "MY_KEY"}
    names = ["HF_TOKEN", "WANDB_API_KEY", "MY_PASSWORD", "DB_PASS", "NCCL_DEBUG", "HF_HOME"]
    assert [is_secret(name) for name in names] == [True, True, True, True, False, False]


def test_a_cluster_is_not_found_by_a_file_that_anyone_can_write(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.delenv("RAY_ADDRESS")
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        (tmp_path / "ray").mkdir()
        (tmp_path / "ray" / "ray_current_cluster").write_text(address)
        # Another service, or the cluster of another user: none of our processes belongs to it.
        assert cluster_address() == ""
        own = SimpleNamespace(real=os.getuid())
        raylet = {"name": "raylet", "cmdline": ["raylet", f"--gcs-address={address}"], "uids": own}
        stranger = raylet | {"uids": SimpleNamespace(real=os.getuid() + 1)}
        for found, expected in ((raylet, address), (stranger, "")):
            listed = [SimpleNamespace(info=found)]
            monkeypatch.setattr("psutil.process_iter", lambda attributes, listed=listed: listed)
            assert cluster_address() == expected
    # Whatever lies in its place does not stop a run.
    file = tmp_path / "ray" / "ray_current_cluster"
    for content in (b"\xff\xfe", b"a" * 2000):
        file.write_bytes(content)
        assert cluster_address() == ""
    file.unlink()
    os.mkfifo(file)
    assert cluster_address() == ""


CLUSTER = """
from pathlib import Path
import ray
import torch
from verl.cluster.start import ray_cluster

torch.cuda.device_count = lambda: 3
with ray_cluster(1, "cuda"):
    # Counted by torch: a machine without NVML has none for Ray.
    assert ray.cluster_resources()["GPU"] == 3
    session = Path(ray._private.worker._global_node.get_session_dir_path())
    assert session.is_dir()
    print(session, flush=True)
    FAIL
"""


@pytest.mark.slow
@pytest.mark.parametrize("fails", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_the_files_of_a_cluster_are_removed_after_a_clean_end(fails: bool):
    code = CLUSTER.replace("FAIL", "1 / 0" if fails else "")
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    session = Path(ended.stdout.strip())
    assert ended.returncode == fails and session.name.startswith("session_20"), ended.stderr
    assert session.exists() is fails
    shutil.rmtree(session, ignore_errors=True)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch):
    """RAY_TMPDIR, with a path that is short enough for sockets."""
    before = os.umask(0o022)
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setenv("RAY_TMPDIR", folder)
        yield Path(folder)
    os.umask(before)


def test_cluster_folder_is_private(place: Path):
    shared = place / "shared"
    shared.mkdir()
    shared.chmod(0o775)
    own = private_folder()
    assert (own, mode(own)) == (place / f"verl-{os.getuid()}", 0o700)
    own.chmod(0o777)
    assert private_folder() == own and mode(own) == 0o700
    own.rmdir()
    own.symlink_to(shared)
    folder = private_folder()
    assert mode(shared) == 0o775
    assert folder.parent == place and folder.name != f"verl-{os.getuid()}" and mode(folder) == 0o700


def test_what_stands_in_ray_tmpdir(place: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(place)
    monkeypatch.setenv("RAY_TMPDIR", "here")
    assert private_folder() == place / "here" / f"verl-{os.getuid()}"
    monkeypatch.setenv("RAY_TMPDIR", "")
    assert private_folder().parent == Path("/tmp")
    monkeypatch.setenv("RAY_TMPDIR", str(place / ("a" * 40)))
    with pytest.raises(ConfigError, match=r"set RAY_TMPDIR to a folder of at most \d\d characters$"):
        private_folder()


def test_a_port_that_answers_and_one_that_does_not():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert reachable(f"127.0.0.1:{port}")
    assert not reachable(f"127.0.0.1:{port}")
    assert not any(map(reachable, ("host0", "host0:", ":6379", "127.0.0.1:99999", "[::1]:x")))


def test_the_loopback_is_no_address_for_others(monkeypatch: pytest.MonkeyPatch):
    # A machine's own name that resolves to 127.0.1.1, as on Debian, and its address.
    monkeypatch.setattr("verl.cluster.network.own_addresses", lambda: {"10.1.2.3": "ib0"})
    monkeypatch.setattr("socket.gethostbyname", lambda host: {"own": "10.1.2.3", "debian": "127.0.1.1"}[host])
    assert address_towards("own") == "10.1.2.3"
    assert not address_towards("debian").startswith("127.")


def test_a_socket_listens_on_one_address_alone():
    with listening_socket("127.0.0.1", 0) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"
        with pytest.raises(OSError, match="in use"):
            listening_socket("127.0.0.1", listener.getsockname()[1])
    # Behind a translation of addresses: an address of no interface here.
    with listening_socket("192.0.2.77", 0) as listener:
        assert listener.getsockname()[0] == "0.0.0.0"  # noqa: S104


@pytest.mark.parametrize("named", [False, True])
def test_a_cluster_that_was_found_can_be_ignored(named: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if named:
        monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(ConfigError) as raised:
        check_head("127.0.0.1:1")
    found = "a running Ray cluster was found at 127.0.0.1:1: nothing answers there"
    assert str(raised.value).startswith("RAY_ADDRESS=127.0.0.1:1: nothing answers" if named else found)
    assert str(raised.value).endswith(
        "head:6379" if named else "RAY_ADDRESS=local ignores it, and the run starts a cluster of its own"
    )
