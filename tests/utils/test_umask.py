import os
import stat
from pathlib import Path

import pytest

from verl.utils.umask import VARIABLE, make_private, private_files, private_folder, restore_umask


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture(autouse=True)
def of_a_user(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(VARIABLE, raising=False)
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


def test_the_folder_of_rays_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    folder = private_folder()
    assert (folder, mode(folder)) == (tmp_path / f"verl-{os.getuid()}", 0o700)
    folder.chmod(0o777)
    assert private_folder() == folder and mode(folder) == 0o700
    # A link that another user may have put there is not followed.
    folder.rmdir()
    folder.symlink_to(tmp_path)
    other = private_folder()
    assert other.parent != tmp_path and mode(other) == 0o700
    other.rmdir()
