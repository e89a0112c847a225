"""The lock of a run's folder; tests/run/test_session.py has a second process."""

import errno
from pathlib import Path

import pytest

from verl.checkpoint.run_lock import run_lock


def test_a_file_system_without_locks_is_used_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def flock(*_: object) -> None:
        raise OSError(code, "flock")

    monkeypatch.setattr("fcntl.flock", flock)
    code = errno.ENOLCK
    with run_lock(tmp_path):
        pass
    code = errno.EIO
    with pytest.raises(OSError, match="flock"), run_lock(tmp_path):
        pass
