"""Machines that come late, never, are lost or lack something; and what those of scripts/cluster.sh tell each other."""

import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import ray

from tests.cluster.machines import NETWORK, free_network, used_networks
from verl.cluster import machines, probe
from verl.cluster.failures import NoRoom, RequeueError
from verl.cluster.launch import Start, claim, wait
from verl.cluster.machines import gather_machines, wait_for_machines
from verl.cluster.probe import ROOM, look, room_for_checkpoint
from verl.config import ConfigError


def machine(rank: int, gpus: int, alive: bool = True) -> dict[str, Any]:
    """A machine that scripts/cluster.sh has started, as Ray lists it."""
    resources = {"CPU": 64.0} | ({"GPU": float(gpus)} if gpus else {})
    labels = {"verl-rank": str(rank)}
    names = {"NodeID": f"node{rank}", "NodeManagerHostname": f"host{rank}"}
    return names | {"Alive": alive, "Resources": resources, "Labels": labels}


def test_machines_of_tests_take_a_free_network():
    assert free_network([]) == "10.77.0"
    assert free_network(["10.77.0.9/24", "10.77.1.1/32", "192.168.0.7/16"]) == "10.77.2"
    assert free_network(["10.0.0.5/8"]) == "172.27.0"
    assert free_network(["10.0.0.5/8", "172.16.0.1/12", "192.168.1.1/16"]) == ""
    assert NETWORK == free_network(used_networks())


def test_machines_come_late(monkeypatch: pytest.MonkeyPatch):
    first, second = machine(0, 8), machine(1, 8)
    states = [[first], [first], [first, machine(1, 8, alive=False)], [first, second]]
    monkeypatch.setattr(ray, "nodes", lambda: states.pop(0) if len(states) > 1 else states[0])
    monkeypatch.setattr("verl.cluster.machines.LOOK_S", 0.0)
    said: list[str] = []
    wait_for_machines(2, 8, "cuda", 60.0, said.append)
    assert said == ["1 of 2 machines here; waiting for the others"]


@pytest.mark.parametrize(
    ("hosts", "missing"), [("", "NODE_RANK 2, NODE_RANK 3"), ("host0 host1 host2 host3", "host2, host3")]
)
def test_machines_that_never_come_are_named(hosts: str, missing: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VERL_HOSTS", hosts)
    monkeypatch.setattr(ray, "nodes", lambda: [machine(0, 8), machine(1, 4)])
    with pytest.raises(ConfigError) as raised:
        wait_for_machines(4, 8, "cuda", -1.0, lambda text: None)
    assert str(raised.value) == (
        "trainer.nnodes=4: 1 of 4 machines with 8 GPUs each were there within trainer.machines_timeout_s=-1: "
        f"host0 (8 GPUs), host1 (4 GPUs); missing: {missing}"
    )


@pytest.mark.parametrize(
    ("found", "limit_s", "expected", "said"),
    [
        ([4], 60.0, 4, []),
        ([1, 1, 4], 60.0, 4, ["1 of 4 machines here; waiting for the others"]),
        ([2], 0.0, 2, ["going on with 2 of 4 machines"]),
        ([1], 0.0, RequeueError("1 of 4 machines are left after 0 s; 2 are needed"), []),
    ],
)
def test_a_restart_goes_on_with_fewer_machines_or_gives_up(monkeypatch, found, limit_s, expected, said):
    monkeypatch.setattr(machines, "LOOK_S", 0.0)
    monkeypatch.setattr(machines, "_answering", lambda *_: found.pop(0) if len(found) > 1 else found[0])
    lines: list[str] = []
    arguments = (4, 2, 8, "cuda", limit_s, lines.append, lambda: None)
    if isinstance(expected, int):
        assert gather_machines(*arguments) == expected
    else:
        with pytest.raises(RequeueError, match=f"^{expected}$"):
            gather_machines(*arguments)
    assert lines == said


@pytest.mark.parametrize(
    ("age_s", "said"),
    [(1, "^machine 0 at 127.0.0.1:6379 gave up: no room$"), (60, "was not there within 0.1 s: MASTER_ADDR=127.0.0.1")],
)
def test_a_machine_0_that_gave_up_is_believed_for_a_while(tmp_path: Path, age_s: float, said: str):
    mark = tmp_path / "failed"
    mark.write_text("no room")
    os.utime(mark, (time.time() - age_s,) * 2)
    with pytest.raises(ConfigError, match=said):
        wait(Start("127.0.0.1", 6379, tmp_path), 0.1)


@pytest.mark.parametrize("mode", [0o775, 0o702, 0o1777])
def test_a_folder_that_others_can_write_is_refused(tmp_path: Path, mode: int):
    folder = tmp_path / "cluster"
    folder.mkdir()
    (folder / "address").write_text("10.0.0.9:6379")
    folder.chmod(mode)
    said = f"^VERL_CLUSTER_DIR={folder}: other accounts can write there .*; chmod go-w it, or "
    start = Start("127.0.0.1", 1, folder)
    for command in (lambda: claim(start), lambda: wait(start, 1.0)):
        with pytest.raises(ConfigError, match=said):
            command()


def test_a_token_that_is_in_a_folder_of_another_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        (tmp_path / "address").write_text(f"127.0.0.1:{port}")
        said = (
            f"machine 0 at localhost:{port} was not there within 0.1 s: {tmp_path}/token does not exist; is the folder"
        )
        with pytest.raises(ConfigError, match=f"^{said} shared"):
            wait(Start("localhost", port, tmp_path), 0.1)


@pytest.fixture
def request_here(
    tmp_path: Path, tiny_model: Path, arithmetic_prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, Any]:
    monkeypatch.setattr(probe, "PATIENCE_S", 0.0)
    (tmp_path / "marker").touch()
    loaded = {"models": [str(tiny_model)], "files": [str(arithmetic_prompts)]}
    return loaded | {"head": "127.0.0.1:6379", "folder": tmp_path, "marker": "marker", "room": 0}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, None),
        ({"marker": "other"}, "trainer.default_local_dir={folder!r}: is not the folder that the driver sees; name one"),
        ({"models": ("/nowhere",)}, "model.path='/nowhere': is not a model's folder there"),
        ({"files": ("/nowhere/train.parquet",)}, "data.*_files='/nowhere/train.parquet': is not there"),
        ({"room": 1 << 60}, "trainer.default_local_dir={folder!r}: "),
    ],
)
def test_what_a_machine_lacks(request_here, changes, problem):
    problems = look(**request_here | changes).problems
    folder = str(request_here["folder"])
    assert len(problems) == (problem is not None), problems
    assert all(found.startswith(str(problem).format(folder=folder)) for found in problems), problems
    assert "room" not in changes or problems[0].endswith(f" MiB free in {folder}; {1 << 40} are needed")
    assert os.listdir(folder) == ["marker"]


def test_fetched_files_respect_umask(request_here, monkeypatch: pytest.MonkeyPatch):
    """Ray runs under a stricter mask; a folder of models may be shared."""
    monkeypatch.setenv("VERL_UMASK", "0027")
    before = os.umask(0o077)
    try:
        look(**request_here)
        assert os.umask(0o077) == 0o027
    finally:
        os.umask(before)


@pytest.mark.parametrize(("sizes", "room"), [([], ROOM), ([1 << 20, 1 << 20], ROOM), ([1 << 20, 3 << 30], 3 << 30)])
def test_the_room_for_a_checkpoint_is_that_of_the_latest(tmp_path: Path, sizes: list[int], room: int):
    for step, size in enumerate(sizes, start=9):
        (tmp_path / f"global_step_{step}" / "actor").mkdir(parents=True)
        with (tmp_path / f"global_step_{step}" / "actor" / "shard").open("wb") as file:
            file.truncate(size)
    assert room_for_checkpoint(tmp_path) == room


@pytest.mark.parametrize(
    ("sizes", "groups", "fits"),
    [
        # On one machine, on two, and on a smaller one beside a larger one.
        ([8], [(1, 4), (1, 4)], True),
        ([8], [(1, 4), (1, 5)], False),
        ([4, 4], [(1, 4), (1, 4)], True),
        ([4, 4], [(2, 4), (1, 4)], False),
        ([8, 2], [(1, 2), (1, 8)], True),
        # Each of two machines holds a worker of the second group.
        ([3, 3], [(1, 2), (2, 1)], True),
        ([2, 2], [(2, 2), (2, 1)], False),
    ],
)
def test_room_for_two_groups(sizes: list[int], groups: list[tuple[int, int]], fits: bool):
    assert machines.fit(sizes, groups) is fits


def test_a_pool_waits_for_its_machines(monkeypatch: pytest.MonkeyPatch):
    states = [[machine(0, 8)], [machine(0, 8), machine(1, 4)]]
    monkeypatch.setattr(ray, "nodes", lambda: states.pop(0) if len(states) > 1 else states[0])
    monkeypatch.setattr("verl.cluster.machines.LOOK_S", 0.0)
    said: list[str] = []
    machines.wait_for_room([(1, 8), (1, 4)], "cuda", 60.0, said.append, lambda: None)
    assert said == ["waiting for machines with room for rollout.nnodes"]
    with pytest.raises(NoRoom, match="8 GPUs each for the trainer and 2 with 4 for rollout.nnodes were"):
        machines.wait_for_room([(1, 8), (2, 4)], "cuda", 0.0, said.append, lambda: None)
