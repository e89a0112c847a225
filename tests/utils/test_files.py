import errno
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from verl.checkpoint.attempts import run_lock
from verl.config.errors import ConfigError
from verl.evaluation.store import RecordFile, StoredSample
from verl.run.tracker_backends import jsonl_backend
from verl.utils.files import naming_storage, replace_text, replacing, storage_line


def test_an_error_leaves_the_old_file(tmp_path: Path):
    path = tmp_path / "file"
    replace_text(path, "old\r\n\u6570")
    with pytest.raises(OSError, match="disk full"), replacing(path) as temporary:
        temporary.write_text("half")
        raise OSError("disk full")
    assert [p.name for p in tmp_path.iterdir()] == ["file"] and path.read_bytes() == b"old\r\n\xe6\x95\xb0"


class Collected(BaseException):
    """As torch.distributed.checkpoint raises it."""

    def __init__(self, error: BaseException) -> None:
        super().__init__("rank 1 failed")
        self.failures = {1: (error, [])}


def caused(error: BaseException) -> RuntimeError:
    outer = RuntimeError("could not be saved")
    outer.__cause__ = error
    return outer


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(errno.ENOSPC, "No"), "No space left on device, make room"),
        (OSError(errno.EDQUOT, "No", "FOLDER/a/b"), "Disk quota exceeded, make room"),
        (Collected(caused(OSError(errno.EROFS, "No", "FOLDER/a"))), "Read-only file system, make it writable"),
        (RuntimeError("I/O error: full (os error 28)"), "No space left on device, make room"),
        (OSError(errno.ENOENT, "No", "FOLDER/gone/a"), "No such file or directory, make it writable"),
        (OSError(errno.ENOENT, "No", "FOLDER/a"), ""),
        (OSError(errno.EACCES, "No", "FOLDER/a"), ""),
        (ValueError("error 28"), ""),
    ],
)
def test_failing_storage_is_one_line(tmp_path: Path, error: BaseException, reason: str):
    inner = error.failures[1][0].__cause__ if isinstance(error, Collected) else error
    named = str(getattr(inner, "filename", None) or ".").replace("FOLDER", str(tmp_path))
    if isinstance(inner, OSError) and inner.filename:
        inner.filename = named
    said, of_error = storage_line(error, tmp_path, 4_100_000), storage_line(error)
    what, _, fix = reason.partition(", ")
    for line, path, sizes in ((said, str(tmp_path), "4.1 MB needed, "), (of_error, named, "")):
        plain = re.sub(r"[\d,]+\.\d MB free", "FREE", line)
        assert plain == (reason and f"{path}: cannot be written ({what}, {sizes}FREE); {fix}, and start it again")
    with pytest.raises(ConfigError if reason else type(error)) as caught, naming_storage(tmp_path, 4_100_000):
        raise error
    assert str(caught.value) == (said or str(error))


def lock(path: Path) -> None:
    with run_lock(path.parent):
        pass


@pytest.mark.parametrize(
    ("name", "write"),
    [
        (".lock", lock),
        ("metrics.jsonl", jsonl_backend),
        ("samples.jsonl", lambda path: RecordFile(path, StoredSample)),
    ],
)
def test_a_folder_of_somebody_else_leads_to_no_other_file(
    tmp_path: Path, name: str, write: Callable[[Path], object]
) -> None:
    folder, other = tmp_path / "run", tmp_path / "other"
    folder.mkdir()
    other.write_text("precious")
    for missing, reason in ((False, "symbolic links"), (True, "symbolic links"), (None, "regular file|No such device")):
        if missing is None:
            os.mkfifo(folder / name)
        else:
            (folder / name).symlink_to(tmp_path / "new" if missing else other)
        with pytest.raises((ConfigError, OSError), match=reason):
            write(folder / name)
        (folder / name).unlink()
    assert other.read_text() == "precious" and not (tmp_path / "new").exists()


def test_a_link_under_the_temporary_name_is_not_followed(tmp_path: Path):
    other = tmp_path / "other"
    other.write_text("precious")
    (tmp_path / ".file.unfinished").symlink_to(other)
    replace_text(tmp_path / "file", "new")
    assert (other.read_text(), (tmp_path / "file").read_text()) == ("precious", "new")
    assert not (tmp_path / "file").is_symlink()
