"""What the probe finds on the machine that it runs on."""

import os
from pathlib import Path

import pytest

from verl.single_controller import probe
from verl.single_controller.probe import ROOM, Request, look, room_for_checkpoint


@pytest.fixture
def request_here(
    tmp_path: Path, tiny_model: Path, arithmetic_prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> Request:
    """A request that this machine meets."""
    monkeypatch.setattr(probe, "PATIENCE_S", 0.0)
    (tmp_path / "marker").touch()
    return Request("127.0.0.1:6379", tmp_path, "marker", (str(tiny_model),), (str(arithmetic_prompts),), 0)


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
    problems = look(request_here._replace(**changes)).problems
    folder = str(request_here.folder)
    assert len(problems) == (problem is not None), problems
    assert all(found.startswith(str(problem).format(folder=folder)) for found in problems), problems
    assert "room" not in changes or problems[0].endswith(f" MiB free in {folder}; {1 << 40} are needed")
    assert os.listdir(folder) == ["marker"]


def test_what_a_machine_fetches_has_the_permissions_that_the_user_wants(request_here, monkeypatch: pytest.MonkeyPatch):
    """Ray runs under a stricter mask; a folder of models may be shared."""
    monkeypatch.setenv("VERL_UMASK", "0027")
    before = os.umask(0o077)
    try:
        look(request_here)
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
