"""A checkpoint's folder: complete or not there, intact or named; and the lock of a run's folder."""

import errno
import io
import json
import os
import resource
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest

from verl.checkpoint import folders
from verl.checkpoint.attempts import Attempt, run_lock
from verl.config import ConfigError
from verl.utils.files import FileRecord, RecordedFile, file_record, write_recorded

MODEL = "actor/huggingface/model.safetensors"
POINTER = "latest_checkpointed_iteration.txt"


def begin(root: Path, step: int, text: str = "weights") -> Path:
    folder = folders.begin_checkpoint(Attempt(root, 0), step)
    (folder / MODEL).parent.mkdir(parents=True)
    (folder / MODEL).write_text(text)
    return folder


def save(root: Path, step: int, text: str = "weights", state: dict[str, object] | None = None) -> Path:
    state = {"job": "ppo", "step": step} if state is None else state
    return folders.complete_checkpoint(begin(root, step, text), step, json.dumps(state))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_checkpoint_is_complete_and_the_pointer_follows(tmp_path: Path):
    root = tmp_path / "a" / "run"
    assert folders.checkpoints(root) == {} and folders.latest_checkpoint(root) is None
    folder = save(root, 5)
    assert folder == root / "global_step_5"
    assert folders.read_state(folder) == {"job": "ppo", "step": 5}
    entries = json.loads((folder / "manifest.json").read_text())["files"]
    assert sorted(entries) == [MODEL, "trainer_state.json"]
    assert FileRecord(**entries["trainer_state.json"]) == file_record(folder / "trainer_state.json")
    assert FileRecord(**entries[MODEL]).size == len("weights")
    folders.verify_checkpoint(folder)
    save(root, 10)
    assert list(folders.checkpoints(root)) == [5, 10]
    assert folders.latest_checkpoint(root) == root / "global_step_10"
    assert names(root) == ["global_step_10", "global_step_5", POINTER]
    assert (root / POINTER).read_text() == "10\n"
    # A checkpoint of the same step is replaced.
    assert (save(root, 5, "new") / MODEL).read_text() == "new"
    assert names(root) == ["global_step_10", "global_step_5", POINTER]


def test_a_file_is_recorded_while_it_is_written(tmp_path: Path):
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


def test_what_the_writers_say_of_their_files_is_taken(tmp_path: Path):
    folder = begin(tmp_path, 3)
    record = file_record(folder / MODEL)
    (folder / MODEL).write_text("altered")  # between their writing and the end
    final = folders.complete_checkpoint(folder, 3, "{}", {MODEL: record})
    with pytest.raises(folders.DamagedCheckpoint, match=r"model\.safetensors was altered"):
        folders.verify_checkpoint(final)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2])


def alter(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[3] ^= 1
    path.write_bytes(content)


def empty(path: Path) -> None:
    path.write_text('{"files": {}}')


def create(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("new")


def make_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def make_huge(path: Path) -> None:
    os.truncate(path, 1 << 40)


def list_file(manifest: Path, name: str) -> None:
    content = json.loads(manifest.read_text())
    content["files"][name] = {"size": 3, "sha256": "0"}
    manifest.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("name", "harm", "message"),
    [
        (MODEL, Path.unlink, r"model\.safetensors is missing$"),
        (MODEL, truncate, r"model\.safetensors has 5 bytes instead of the 7 that"),
        (MODEL, alter, r"model\.safetensors was altered: its checksum differs"),
        ("trainer_state.json", alter, r"trainer_state\.json was altered"),
        ("manifest.json", Path.unlink, r"manifest\.json cannot be read: No such file or directory$"),
        ("manifest.json", truncate, r"manifest\.json is damaged$"),
        ("manifest.json", empty, r"damaged: it does not list trainer"),
        ("manifest.json", lambda path: path.write_text("[" * 9999), r"manifest\.json is damaged$"),
        ("manifest.json", lambda path: path.write_bytes(b"\xff"), r"manifest\.json is damaged$"),
        ("manifest.json", lambda path: list_file(path, "/etc/passwd"), r"it lists /etc/passwd, which is elsewhere$"),
        ("manifest.json", lambda path: list_file(path, "actor/../../x"), r"it lists actor/../../x, which is els"),
        ("manifest.json", make_pipe, r"manifest\.json is not a regular file$"),
        (MODEL, make_pipe, r"model\.safetensors is not a regular file$"),
        ("trainer_state.json", make_huge, r"trainer_state\.json has 1099511627776 bytes, too many for a \.json file$"),
        ("actor/shards/more.safetensors", create, r"/more\.safetensors is not listed in manifest\.json, so it does"),
        ("actor/.more.safetensors", create, r"/actor/\.more\.safetensors is not listed in manifest\.json"),
        ("generators/rank_00001.json", create, r"/generators/rank_00001\.json is not listed in manifest\.json"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, name: str, harm: Callable[[Path], object], message: str):
    folder = save(tmp_path, 5)
    harm(folder / name)
    with pytest.raises(ConfigError, match=message):
        folders.verify_checkpoint(folder)


def test_later_exports_and_files_that_nothing_reads_are_not_foreign(tmp_path: Path):
    folder = save(tmp_path, 5)
    for name in ("actor/huggingface/config.json", "actor/.nfs0001", "notes.txt", "actor/.huggingface.12.unfinished/a"):
        create(folder / name)
    folders.verify_checkpoint(folder)


@pytest.mark.parametrize("text", ["", "[1]", "3", "{", "[" * 9999, "7" * 5000])
def test_a_state_that_is_none_is_named(text: str, tmp_path: Path):
    (tmp_path / "trainer_state.json").write_text(text)
    with pytest.raises(folders.DamagedCheckpoint, match=r"trainer_state\.json is damaged"):
        folders.read_state(tmp_path)


def test_a_file_that_the_disk_does_not_give_back_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = save(tmp_path, 5)
    monkeypatch.setattr(folders, "file_record", Mock(side_effect=OSError(errno.EIO, "Input/output error")))
    with pytest.raises(folders.DamagedCheckpoint, match=r"global_step_5/\S+ cannot be read: Input/output error$"):
        folders.verify_checkpoint(folder)


def test_checkpoints_are_removed_except_those_to_keep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for step in (4, 5, 10):
        save(tmp_path, step)
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
def test_which_checkpoints_stay(newest: int, always: list[int], scores: dict[int, float], kept: set[int]):
    assert folders.steps_to_keep([8, 2, 6, 4], newest, always, scores) == kept


def test_what_is_not_wholly_there_never_has_the_final_name(tmp_path: Path):
    folder, other = folders.begin_checkpoint(Attempt(tmp_path, 0), 5), folders.begin_checkpoint(Attempt(tmp_path, 0), 5)
    assert folder != other  # a process that outlives its run writes into its own
    assert folder.parent == tmp_path  # on the same disk: a rename to another one would be a copy
    assert folders.checkpoints(tmp_path) == {}
    folders.remove_unfinished(tmp_path)
    assert names(tmp_path) == []
    # Files that another machine keeps to itself.
    folder = folders.begin_checkpoint(Attempt(tmp_path, 0), 5)
    with pytest.raises(RuntimeError, match="no worker wrote the model there; all machines must share"):
        folders.complete_checkpoint(folder, 5, "{}")
    folder = begin(tmp_path, 5)
    elsewhere = {"actor/shards/shard-00002.safetensors": FileRecord(7, "")}
    with pytest.raises(RuntimeError, match=r"shard-00002\.safetensors was written elsewhere; all machines must share"):
        folders.complete_checkpoint(folder, 5, "{}", elsewhere)
    assert folders.checkpoints(tmp_path) == {}


def test_a_full_disk_leaves_nothing_under_a_final_name(tmp_path: Path):
    save(tmp_path, 5)
    limit, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # A process that may write files of 64 KiB at most meets the errors of a full disk, here in the trainer's own state.
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            save(tmp_path, 10, state={"x": "x" * (1 << 20)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    assert list(folders.checkpoints(tmp_path)) == [5] and (tmp_path / POINTER).read_text() == "5\n"


def test_a_file_system_without_locks_is_used_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What a lock refuses is in tests/run/test_session.py."""
    monkeypatch.setattr("fcntl.flock", Mock(side_effect=OSError(errno.ENOLCK, "flock")))
    with run_lock(tmp_path):
        pass
    monkeypatch.setattr("fcntl.flock", Mock(side_effect=OSError(errno.EIO, "flock")))
    with pytest.raises(OSError, match="flock"), run_lock(tmp_path):
        pass
    (tmp_path / "file").touch()
    for name, reason in (("file/run", "Not a directory"), ("a" * 300, "File name too long")):
        refused = pytest.raises(
            ConfigError, match=rf"default_local_dir='.*': cannot be written \({reason}\); name another"
        )
        with refused, run_lock(tmp_path / name):
            pass
