"""Attempts at a run: a process of an abandoned one writes nothing that counts."""

import errno
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.kit import MODEL, POINTER, begin_checkpoint, harm, save_checkpoint
from verl.checkpoint import folders
from verl.checkpoint.attempts import Attempt, StaleAttempt, newest_attempt
from verl.checkpoint.saver import CheckpointSaver


def test_attempts_are_counted_from_one(tmp_path: Path, refused):
    assert newest_attempt(tmp_path) == 0
    first = Attempt.claim(tmp_path)
    first.check(tmp_path / "file")
    assert (first.number, Attempt.claim(tmp_path).number, newest_attempt(tmp_path)) == (1, 2, 2)
    with refused("TMP/file: not written by attempt 1, since attempt 2 has taken over ...", StaleAttempt):
        first.check(tmp_path / "file")


def test_folder_that_cannot_be_claimed_is_refused(tmp_path: Path, refused, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / ".attempt").write_text("")
    with refused("TMP/.attempt: is damaged; write the number of attempts so far into it"):
        Attempt.claim(tmp_path)
    (tmp_path / ".attempt").unlink()
    full = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr("verl.checkpoint.attempts.replace_text", full)
    with refused("trainer.default_local_dir='TMP': cannot be written (No space left on device)..."):
        Attempt.claim(tmp_path)


def test_stale_attempt_begins_and_completes_nothing(tmp_path: Path):
    stale = Attempt.claim(tmp_path)
    unfinished = begin_checkpoint(tmp_path, 2, attempt=stale)
    save_checkpoint(tmp_path, 1, attempt=stale)
    save_checkpoint(tmp_path, 2, "new", Attempt.claim(tmp_path))
    for write in (
        lambda: begin_checkpoint(tmp_path, 3, attempt=stale),
        lambda: folders.complete_checkpoint(unfinished, 2, "{}"),
    ):
        with pytest.raises(StaleAttempt):
            write()
    assert (tmp_path / "global_step_2" / MODEL).read_text() == "new"
    assert (tmp_path / POINTER).read_text() == "2\n"
    assert list(folders.checkpoints(tmp_path)) == [1, 2]


@pytest.mark.parametrize("moment", ["before the rename", "before the pointer", "after the last check"])
def test_attempt_overtaken_late_does_not_move_the_pointer(tmp_path: Path, monkeypatch, moment: str):
    """It was paused in the middle of completing its checkpoint, for as long as the next attempt took to begin."""
    stale = Attempt.claim(tmp_path)
    unfinished = begin_checkpoint(tmp_path, 2, attempt=stale)
    flush = folders.flush

    def overtaken(path: Path) -> None:
        flush(path)
        if path == (tmp_path if moment == "before the pointer" else unfinished):
            Attempt.claim(tmp_path)
            if moment == "after the last check":
                monkeypatch.setattr(Attempt, "check", lambda *_: None)
                folders.remove_unfinished(tmp_path)

    monkeypatch.setattr(folders, "flush", overtaken)
    with pytest.raises(FileNotFoundError if moment == "after the last check" else StaleAttempt):
        folders.complete_checkpoint(unfinished, 2, "{}")
    assert (2 in folders.checkpoints(tmp_path)) == (moment == "before the pointer")
    assert not (tmp_path / POINTER).exists()


def test_attempt_removes_leftovers_of_earlier_ones_only(tmp_path: Path):
    stale = Attempt.claim(tmp_path)
    left = begin_checkpoint(tmp_path, 1, attempt=stale)
    writing = begin_checkpoint(tmp_path, 1, attempt=Attempt.claim(tmp_path))
    folders.remove_unfinished(tmp_path, stale.number)
    assert writing.is_dir() and not left.exists()
    assert [path for path in tmp_path.iterdir() if path.name != ".attempt"] == [writing]


class Writers:
    """Workers that write at once; something happens before they report that they have finished."""

    def __init__(self, meanwhile: Callable[[], object]) -> None:
        self.meanwhile = meanwhile

    def run(self, method: str, *arguments: object) -> list[object]:
        if method == "save":
            (folder,) = (argument for argument in arguments if isinstance(argument, Path))
            harm(folder, f"write({MODEL!r}, 'weights')")
            return [None]
        self.meanwhile()
        return [{}]


def test_stale_attempt_removes_no_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    stale = Attempt.claim(tmp_path)
    for step in (1, 2):
        save_checkpoint(tmp_path, step, attempt=stale)
    saver = CheckpointSaver(stale, Writers(lambda: Attempt.claim(tmp_path)), False, False, newest=1)
    with pytest.raises(StaleAttempt):
        saver.save(3, {}, {})
    assert list(folders.checkpoints(tmp_path)) == [1, 2] and saver.saved_step is None
    saver = CheckpointSaver(Attempt(tmp_path, 2), Writers(lambda: None), False, False, newest=1)
    saver.save(3, {}, {})
    assert list(folders.checkpoints(tmp_path)) == [3] and saver.saved_step == 3
    # Overtaken after its own checkpoint is complete.
    monkeypatch.setattr("verl.checkpoint.saver.steps_to_keep", lambda *_: {Attempt.claim(tmp_path).number})
    with pytest.raises(StaleAttempt):
        saver.save(4, {}, {})
    assert list(folders.checkpoints(tmp_path)) == [3, 4]
