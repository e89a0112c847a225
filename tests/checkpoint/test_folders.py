"""A checkpoint's folder: complete or not there, intact or named; and the lock of a run's folder."""

import errno
import io
import json
import os
import resource
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.kit import MODEL, POINTER, begin_checkpoint, harm, save_checkpoint
from tests.tables import refusals
from verl.checkpoint import folders
from verl.checkpoint.attempts import Attempt, run_lock
from verl.utils.files import FileRecord, RecordedFile, file_record, write_recorded


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_checkpoint_is_complete_and_the_pointer_follows(tmp_path: Path):
    root = tmp_path / "a" / "run"
    assert folders.checkpoints(root) == {} and folders.latest_checkpoint(root) is None
    folder = save_checkpoint(root, 5)
    assert folder == root / "global_step_5"
    assert folders.read_state(folder) == {"job": "ppo", "step": 5}
    entries = json.loads((folder / "manifest.json").read_text())["files"]
    assert sorted(entries) == [MODEL, "trainer_state.json"]
    assert FileRecord(**entries["trainer_state.json"]) == file_record(folder / "trainer_state.json")
    assert FileRecord(**entries[MODEL]).size == len("weights")
    folders.verify_checkpoint(folder)
    save_checkpoint(root, 10)
    assert list(folders.checkpoints(root)) == [5, 10]
    assert folders.latest_checkpoint(root) == root / "global_step_10"
    assert names(root) == ["global_step_10", "global_step_5", POINTER]
    assert (root / POINTER).read_text() == "10\n"
    # A checkpoint of the same step is replaced.
    assert (save_checkpoint(root, 5, "new") / MODEL).read_text() == "new"
    assert names(root) == ["global_step_10", "global_step_5", POINTER]


def test_file_is_hashed_while_it_is_written(tmp_path: Path):
    path = tmp_path / "file"
    # The first example of FIPS 180-2.
    digest = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    with RecordedFile(path) as file:
        file.write(b"a")
        file.write(memoryview(b"bc"))
    assert file.record == FileRecord(3, digest) == write_recorded(path, b"abc") == file_record(path)
    assert path.read_bytes() == b"abc"
    # What was written cannot be written over.
    with RecordedFile(path) as file, pytest.raises(io.UnsupportedOperation):
        file.seek(0)


def test_records_of_the_writers_are_kept(tmp_path: Path, refused):
    folder = begin_checkpoint(tmp_path, 3)
    record = file_record(folder / MODEL)
    (folder / MODEL).write_text("altered")  # between their writing and the end
    final = folders.complete_checkpoint(folder, 3, "{}", {MODEL: record})
    with refused(f"TMP/{final.name}/{MODEL} was altered...", folders.DamagedCheckpoint):
        folders.verify_checkpoint(final)


@pytest.mark.parametrize(("damage", "line"), refusals("checkpoint/refusals.txt", "folders"))
def test_damaged_file_is_named(tmp_path: Path, refused, damage: str, line: str):
    folder = save_checkpoint(tmp_path, 5)
    harm(folder, damage)
    with refused(line):
        folders.verify_checkpoint(folder)


def test_files_that_nothing_reads_are_not_foreign(tmp_path: Path):
    folder = save_checkpoint(tmp_path, 5)
    for name in ("actor/huggingface/config.json", "actor/.nfs0001", "notes.txt", "actor/.huggingface.12.unfinished/a"):
        harm(folder, f"write({name!r}, 'new')")
    folders.verify_checkpoint(folder)


@pytest.mark.parametrize("text", ["", "[1]", "3", "{", "[" * 9999, "7" * 5000])
def test_trainer_state_that_is_no_object_is_named(text: str, tmp_path: Path, refused):
    (tmp_path / "trainer_state.json").write_text(text)
    with refused("TMP/trainer_state.json is damaged...", folders.DamagedCheckpoint):
        folders.read_state(tmp_path)


def test_file_with_an_input_output_error_is_named(tmp_path: Path, refused, monkeypatch: pytest.MonkeyPatch):
    folder = save_checkpoint(tmp_path, 5)
    monkeypatch.setattr(folders, "file_record", Mock(side_effect=OSError(errno.EIO, "Input/output error")))
    with refused("TMP/global_step_5/... cannot be read: Input/output error", folders.DamagedCheckpoint):
        folders.verify_checkpoint(folder)


def test_old_checkpoints_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for step in (4, 5, 10):
        save_checkpoint(tmp_path, step)
    (tmp_path / "global_step_5.damaged").mkdir()
    folders.remove_checkpoints(tmp_path, keep={10, 4, 7})
    assert names(tmp_path) == ["global_step_10", "global_step_4", "global_step_5.damaged", POINTER]
    # A checkpoint that cannot be removed does not end the run.
    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", Mock(side_effect=OSError(errno.ENOTEMPTY, "Directory not empty")))
        folders.remove_checkpoints(tmp_path, keep={10})
    assert list(folders.checkpoints(tmp_path)) == [10] and len(names(tmp_path)) == 4
    folders.remove_unfinished(tmp_path)
    assert names(tmp_path) == ["global_step_10", "global_step_5.damaged", POINTER]


@pytest.mark.parametrize(
    ("newest", "always", "scores", "kept"),
    [
        (0, [], {}, {2, 4, 6, 8}),
        (1, [], {}, {8}),
        (2, [], {}, {6, 8}),
        (9, [], {}, {2, 4, 6, 8}),
        (1, [2, 5], {}, {2, 8}),
        # The best of those that exist; step 5 was validated but not saved.
        (1, [], {2: 0.25, 4: 0.5, 5: 0.75, 8: 0.25}, {4, 8}),
        (1, [], {2: 0.5, 4: 0.5, 8: 0.5}, {2, 8}),
        (1, [], {8: 0.5}, {8}),
    ],
)
def test_steps_to_keep(newest: int, always: list[int], scores: dict[int, float], kept: set[int]):
    assert folders.steps_to_keep([8, 2, 6, 4], newest, always, scores) == kept


def test_incomplete_checkpoint_never_has_the_final_name(tmp_path: Path, refused):
    folder, other = folders.begin_checkpoint(Attempt(tmp_path, 0), 5), folders.begin_checkpoint(Attempt(tmp_path, 0), 5)
    assert folder != other  # a process that outlives its run writes into its own
    assert folder.parent == tmp_path  # on the same disk: a rename to another one would be a copy
    assert folders.checkpoints(tmp_path) == {}
    folders.remove_unfinished(tmp_path)
    assert names(tmp_path) == []
    # Files that another machine keeps to itself.
    folder = folders.begin_checkpoint(Attempt(tmp_path, 0), 5)
    with refused("...no worker wrote the model there; all machines must share...", RuntimeError):
        folders.complete_checkpoint(folder, 5, "{}")
    folder = begin_checkpoint(tmp_path, 5)
    elsewhere = {"actor/shards/shard-00002.safetensors": FileRecord(7, "")}
    with refused("...shard-00002.safetensors was written elsewhere; all machines must share...", RuntimeError):
        folders.complete_checkpoint(folder, 5, "{}", elsewhere)
    assert folders.checkpoints(tmp_path) == {}


def test_full_disk_leaves_no_final_name(tmp_path: Path):
    save_checkpoint(tmp_path, 5)
    limit, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # A process that may write files of 64 KiB at most meets the errors of a full disk, here in the trainer's own state.
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            save_checkpoint(tmp_path, 10, x="x" * (1 << 20))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    assert list(folders.checkpoints(tmp_path)) == [5] and (tmp_path / POINTER).read_text() == "5\n"


def test_file_system_without_locks_is_used_without(tmp_path: Path, refused, monkeypatch: pytest.MonkeyPatch):
    """What a lock refuses is in tests/run/test_session.py."""
    monkeypatch.setattr("fcntl.flock", Mock(side_effect=OSError(errno.ENOLCK, "flock")))
    with run_lock(tmp_path):
        pass
    monkeypatch.setattr("fcntl.flock", Mock(side_effect=OSError(errno.EIO, "flock")))
    with pytest.raises(OSError, match="flock"), run_lock(tmp_path):
        pass
    (tmp_path / "file").touch()
    for name, reason in (("file/run", "Not a directory"), ("a" * 300, "File name too long")):
        line = f"trainer.default_local_dir='{tmp_path}/{name}': cannot be written ({reason}); name another..."
        with refused(line.replace(str(tmp_path), "TMP")), run_lock(tmp_path / name):
            pass
