import os
import stat
import tempfile
from pathlib import Path

import pytest

from verl.config.errors import ConfigError
from verl.single_controller.private_files import make_private, private_files, private_folder
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


def test_a_token_that_others_could_read(tmp_path: Path):
    token = tmp_path / "auth_token"
    token.write_text("secret")
    token.chmod(0o644)
    make_private(token)
    make_private(tmp_path / "missing")
    assert mode(token) == 0o600


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch):
    """RAY_TMPDIR, with a path that is short enough for sockets."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setenv("RAY_TMPDIR", folder)
        yield Path(folder)


def test_the_folder_of_rays_files(place: Path):
    folder = private_folder()
    assert (folder, mode(folder)) == (place / f"verl-{os.getuid()}", 0o700)
    folder.chmod(0o777)
    assert private_folder() == folder and mode(folder) == 0o700


def test_a_link_that_another_user_may_have_put_there_is_not_followed(place: Path):
    shared = place / "shared"
    shared.mkdir()
    shared.chmod(0o775)
    (place / f"verl-{os.getuid()}").symlink_to(shared)
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
