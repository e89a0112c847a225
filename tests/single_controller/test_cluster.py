import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import ray
import torch

from verl.config import ConfigError
from verl.single_controller.cluster import resolve_device
from verl.single_controller.ray_head import cluster_address
from verl.single_controller.worker_group import WorkerGroup


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """None that this computer may have running."""
    monkeypatch.setenv("RAY_ADDRESS", "local")


@pytest.mark.parametrize(
    ("device", "gpu", "expected"),
    [("auto", True, "cuda"), ("auto", False, "cpu"), ("cpu", True, "cpu"), ("cuda", True, "cuda"), ("cuda", False, "")],
)
def test_the_device(monkeypatch: pytest.MonkeyPatch, device: str, gpu: bool, expected: str):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    if expected:
        assert resolve_device(device) == expected
    else:
        with pytest.raises(ConfigError, match="^device='cuda': torch sees no GPU; set device=auto or cpu$"):
            resolve_device(device)


def test_several_machines_need_a_cluster():
    with pytest.raises(ConfigError, match=r"^trainer.nnodes=2: this machine is alone. Start .* NNODES, NODE_RANK and"):
        resolve_device("auto", nnodes=2)


@pytest.mark.parametrize(
    ("address", "line"),
    [
        (
            "ray://head:10001",
            "RAY_ADDRESS=ray://head:10001: a run is part of the cluster; set it to head:6379, or",
        ),
        ("http://head:8265", "RAY_ADDRESS=http://head:8265: a run is part of the cluster"),
    ],
)
def test_addresses_that_a_run_cannot_use(address: str, line: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ConfigError, match=f"^{line}"):
        resolve_device("auto")


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


def test_whatever_lies_in_place_of_that_file_does_not_stop_a_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.delenv("RAY_ADDRESS")
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    file = tmp_path / "ray" / "ray_current_cluster"
    file.parent.mkdir()
    file.write_bytes(b"\xff\xfe")
    assert cluster_address() == ""
    file.write_text("a" * 2000)
    assert cluster_address() == ""
    file.unlink()
    os.mkfifo(file)
    assert cluster_address() == ""
    file.unlink()
    file.mkdir()
    assert cluster_address() == ""


def test_a_local_cluster_leaves_no_token(ray_session: None, monkeypatch: pytest.MonkeyPatch):
    # Otherwise the next `ray start` on this machine would demand it of everyone.
    assert os.environ["RAY_AUTH_MODE"] == "token" and ray.is_initialized()
    assert len(os.environ.get("RAY_AUTH_TOKEN", "")) == 64 or os.path.exists(os.path.expanduser("~/.ray/auth_token"))


def test_on_one_machine_nothing_can_be_reached_from_others(start: Callable[..., WorkerGroup]):
    group = start("MeetingWorker", 2)
    try:
        processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
        sockets = [
            (p.name(), s) for p in processes for s in p.net_connections("inet") if s.status == psutil.CONN_LISTEN
        ]
        addresses = {name: socket.laddr.ip.removeprefix("::ffff:") for name, socket in sockets}
        assert {"gcs_server", "raylet"} <= addresses.keys()
        assert any(20000 <= s.laddr.port < 30000 and "_Host" in name for name, s in sockets)  # torch's store
        elsewhere = [(name, s.laddr) for name, s in sockets if s.laddr.ip.removeprefix("::ffff:") != "127.0.0.1"]
        assert elsewhere == []
        # Ray's files are this user's alone, those of workers have the user's own permissions.
        session = Path(ray._private.worker._global_node.get_session_dir_path())
        assert stat.S_IMODE(session.parents[1].stat().st_mode) == 0o700
        logs = [path for path in session.glob("logs/*.log")]
        assert logs and all(path.stat().st_mode & 0o077 == 0 for path in logs)
        os.umask(own := os.umask(0o022))
        assert group.run("umask") == [own, own]
    finally:
        group.close()
