"""The lock of a run's folder."""

import errno
from pathlib import Path

import pytest

from verl.checkpoint.run_lock import run_lock
from verl.config.errors import ConfigError


def test_one_process_at_a_time_works_in_a_folder(tmp_path: Path):
    folder = tmp_path / "new"
    with run_lock(folder):
        with pytest.raises(ConfigError, match=r"trainer\.default_local_dir=.*another run is using this folder"):
            with run_lock(folder):
                pass
    with run_lock(folder):
        pass


def test_a_file_system_without_locks_keeps_nobody_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def flock(*_: object) -> None:
        raise OSError(code, "flock")

    monkeypatch.setattr("fcntl.flock", flock)
    code = errno.ENOLCK
    with run_lock(tmp_path):
        pass
    code = errno.EIO
    with pytest.raises(OSError, match="flock"), run_lock(tmp_path):
        pass
