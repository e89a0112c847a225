import os
import stat
import tempfile
from pathlib import Path

import pytest

from verl.config.errors import ConfigError
from verl.single_controller.private_files import private_files, private_folder
from verl.utils.process import UMASK, restore_umask


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture(autouse=True)
def of_a_user(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(UMASK, raising=False)
    before = os.umask(0o022)
    yield
    os.umask(before)


def test_files_within_are_private_and_workers_get_the_own_mask_back(tmp_path: Path):
    with private_files():
        (tmp_path / "inside").touch()
        restore_umask()  # as a worker does
        (tmp_path / "of a worker").touch()
    (tmp_path / "after").touch()
    assert [mode(tmp_path / name) for name in ("inside", "of a worker", "after")] == [0o600, 0o644, 0o644]


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch):
    """RAY_TMPDIR, with a path that is short enough for sockets."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setenv("RAY_TMPDIR", folder)
        yield Path(folder)


def test_the_folder_is_private_and_a_link_of_another_user_is_not_followed(place: Path):
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
