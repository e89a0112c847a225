import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from verl.checkpoint.folders import (
    DamagedCheckpoint,
    begin_checkpoint,
    checkpoints,
    complete_checkpoint,
    latest_checkpoint,
    read_state,
    remove_checkpoints,
    remove_unfinished,
    steps_to_keep,
    verify_checkpoint,
)
from verl.utils.files import FileRecord, file_record

ROOT = Path(__file__).resolve().parents[2]


def write_model(folder: Path, text: str = "weights") -> None:
    (folder / "actor" / "huggingface").mkdir(parents=True)
    (folder / "actor" / "huggingface" / "model.safetensors").write_text(text)


def save(root: Path, step: int, text: str = "weights") -> Path:
    folder = begin_checkpoint(root, step)
    write_model(folder, text)
    return complete_checkpoint(folder, root, step, json.dumps({"step": step}))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_checkpoint_is_complete_and_the_pointer_follows(tmp_path: Path):
    root = tmp_path / "a" / "run"
    assert checkpoints(root) == {} and latest_checkpoint(root) is None
    folder = save(root, 5)
    assert folder == root / "global_step_5"
    assert read_state(folder) == {"step": 5}
    entries = json.loads((folder / "manifest.json").read_text())["files"]
    assert sorted(entries) == ["actor/huggingface/model.safetensors", "trainer_state.json"]
    assert FileRecord(**entries["trainer_state.json"]) == file_record(folder / "trainer_state.json")
    assert FileRecord(**entries["actor/huggingface/model.safetensors"]).size == len("weights")
    verify_checkpoint(folder)
    # The first example of FIPS 180-2.
    (tmp_path / "file").write_text("abc")
    digest = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert file_record(tmp_path / "file") == FileRecord(3, digest)

    save(root, 10)
    assert list(checkpoints(root)) == [5, 10]
    assert latest_checkpoint(root) == root / "global_step_10"
    assert names(root) == ["global_step_10", "global_step_5", "latest_checkpointed_iteration.txt"]
    assert (root / "latest_checkpointed_iteration.txt").read_text() == "10\n"
    # A checkpoint of the same step is replaced.
    final = save(root, 5, "new")
    assert (final / "actor" / "huggingface" / "model.safetensors").read_text() == "new"
    assert names(root) == ["global_step_10", "global_step_5", "latest_checkpointed_iteration.txt"]


def test_what_the_writers_say_of_their_files_is_taken(tmp_path: Path):
    folder = begin_checkpoint(tmp_path, 3)
    write_model(folder)
    path = folder / "actor" / "huggingface" / "model.safetensors"
    record = file_record(path)
    path.write_text("altered")  # between their writing and the end
    final = complete_checkpoint(folder, tmp_path, 3, "{}", {"actor/huggingface/model.safetensors": record})
    with pytest.raises(DamagedCheckpoint, match=r"model\.safetensors was altered"):
        verify_checkpoint(final)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2])


def alter(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[3] ^= 1
    path.write_bytes(content)


MODEL = "actor/huggingface/model.safetensors"
DAMAGES: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "missing": (MODEL, Path.unlink, r"model\.safetensors is missing$"),
    "truncated": (MODEL, truncate, r"model\.safetensors has 5 bytes instead of the 7 that"),
    "altered": (MODEL, alter, r"model\.safetensors was altered: its checksum differs"),
    "state": ("trainer_state.json", alter, r"trainer_state\.json was altered"),
    "no manifest": ("manifest.json", Path.unlink, r"manifest\.json cannot be read: No such file or directory$"),
    "half a manifest": ("manifest.json", truncate, r"manifest\.json is damaged$"),
    "no entries": (
        "manifest.json",
        lambda path: path.write_text('{"files": {}}'),
        r"damaged: it does not list trainer",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_named(tmp_path: Path, damage: str):
    folder = save(tmp_path, 5)
    name, harm, message = DAMAGES[damage]
    harm(folder / name)
    with pytest.raises(DamagedCheckpoint, match=message):
        verify_checkpoint(folder)


def test_a_file_that_the_disk_does_not_give_back_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = save(tmp_path, 5)

    def bad_sector(path: Path) -> FileRecord:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("verl.checkpoint.folders.file_record", bad_sector)
    with pytest.raises(DamagedCheckpoint, match=r"global_step_5/\S+ cannot be read: Input/output error$"):
        verify_checkpoint(folder)


def test_checkpoints_are_removed_except_those_to_keep(tmp_path: Path):
    for step in (4, 5, 10):
        save(tmp_path, step)
    (tmp_path / "global_step_5.damaged").mkdir()
    remove_checkpoints(tmp_path, keep={10, 4, 7})
    expected = ["global_step_10", "global_step_4", "global_step_5.damaged", "latest_checkpointed_iteration.txt"]
    assert names(tmp_path) == expected


def test_what_cannot_be_removed_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for step in (4, 5):
        save(tmp_path, step)

    def busy(*arguments: object, **options: object) -> None:
        raise OSError(errno.ENOTEMPTY, "Directory not empty")

    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", busy)
        remove_checkpoints(tmp_path, keep={5})
    assert list(checkpoints(tmp_path)) == [5] and len(names(tmp_path)) == 3
    remove_unfinished(tmp_path)
    assert names(tmp_path) == ["global_step_5", "latest_checkpointed_iteration.txt"]


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
    assert steps_to_keep([8, 2, 6, 4], newest, always, scores) == kept


def test_while_writing_nothing_has_the_final_name(tmp_path: Path):
    folder, other = begin_checkpoint(tmp_path, 5), begin_checkpoint(tmp_path, 5)
    assert folder != other  # a process that outlives its run writes into its own
    assert folder.parent == tmp_path  # on the same disk: a rename to another one would be a copy
    assert checkpoints(tmp_path) == {}
    remove_unfinished(tmp_path)
    assert names(tmp_path) == []


def test_files_that_another_machine_keeps_to_itself(tmp_path: Path):
    folder = begin_checkpoint(tmp_path, 5)
    with pytest.raises(RuntimeError, match="no worker wrote the model there; all machines must share"):
        complete_checkpoint(folder, tmp_path, 5, "{}")
    write_model(folder)
    elsewhere = {"actor/shards/shard-00002.safetensors": FileRecord(7, "")}
    with pytest.raises(RuntimeError, match=r"shard-00002\.safetensors was written elsewhere; all machines must share"):
        complete_checkpoint(folder, tmp_path, 5, "{}", elsewhere)
    assert checkpoints(tmp_path) == {}


def test_a_pointer_that_cannot_be_written_stays_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    save(tmp_path, 5)

    def full(self: Path, target: Path) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        save(tmp_path, 10)
    assert names(tmp_path) == ["global_step_10", "global_step_5", "latest_checkpointed_iteration.txt"]
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "5\n"
    verify_checkpoint(tmp_path / "global_step_10")


# A process that may write files of 64 KiB at most meets the errors of a full disk, here in the trainer's own state.
FULL_DISK = """
import resource, sys
from pathlib import Path
from verl.checkpoint.folders import begin_checkpoint, complete_checkpoint

_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
root = Path(sys.argv[1])
for step, size in ((5, 1), (10, 1 << 20)):
    folder = begin_checkpoint(root, step)
    (folder / "actor").mkdir()
    (folder / "actor" / "config.json").write_text("{}")
    try:
        complete_checkpoint(folder, root, step, "x" * size)
    except OSError as error:
        print(error)
"""


def test_a_full_disk_leaves_nothing_under_a_final_name(tmp_path: Path):
    result = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert "File too large" in result.stdout
    assert list(checkpoints(tmp_path)) == [5]
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "5\n"
