import os
from collections.abc import Callable
from pathlib import Path

import pytest

from verl.checkpoint.attempts import run_lock
from verl.config.errors import ConfigError
from verl.evaluation.store import RecordFile, StoredSample
from verl.run.tracker_backends import jsonl_backend
from verl.utils.files import replace_text, replacing


def test_an_error_leaves_the_old_file(tmp_path: Path):
    path = tmp_path / "file"
    replace_text(path, "old\r\n\u6570")
    with pytest.raises(OSError, match="disk full"), replacing(path) as temporary:
        temporary.write_text("half")
        raise OSError("disk full")
    assert [p.name for p in tmp_path.iterdir()] == ["file"] and path.read_bytes() == b"old\r\n\xe6\x95\xb0"


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
