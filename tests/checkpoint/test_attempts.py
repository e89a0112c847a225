"""A process of an abandoned attempt writes nothing that counts."""

import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from verl.checkpoint import folders
from verl.checkpoint.attempts import Attempt, StaleAttempt, newest_attempt
from verl.checkpoint.saver import CheckpointSaver
from verl.config import ConfigError


def written(attempt: Attempt, step: int, text: str = "weights") -> Path:
    """What workers leave before a checkpoint is completed."""
    folder = folders.begin_checkpoint(attempt, step)
    (folder / "actor").mkdir()
    (folder / "actor" / "weights").write_text(text)
    return folder


def test_attempts_are_counted_from_one(tmp_path: Path):
    assert newest_attempt(tmp_path) == 0
    first = Attempt.claim(tmp_path)
    first.check(tmp_path / "file")
    assert (first.number, Attempt.claim(tmp_path).number, newest_attempt(tmp_path)) == (1, 2, 2)
    message = r"^.*/file: not written by attempt 1, since attempt 2 has taken over "
    with pytest.raises(StaleAttempt, match=message):
        first.check(tmp_path / "file")


def test_a_folder_that_cannot_be_claimed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / ".attempt").write_text("")
    with pytest.raises(ConfigError, match=r"/\.attempt: is damaged; write the number of attempts so far into it$"):
        Attempt.claim(tmp_path)

    def full(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / ".attempt").unlink()
    monkeypatch.setattr("verl.checkpoint.attempts.replace_text", full)
    with pytest.raises(ConfigError, match=r"^trainer\.default_local_dir=.*: cannot be written \(No space left on dev"):
        Attempt.claim(tmp_path)


def test_a_stale_attempt_begins_and_completes_nothing(tmp_path: Path):
    stale = Attempt.claim(tmp_path)
    before, unfinished = written(stale, 1), written(stale, 2)
    folders.complete_checkpoint(before, 1, "{}")
    newest = Attempt.claim(tmp_path)
    folders.complete_checkpoint(written(newest, 2, "new"), 2, "{}")
    for write in (lambda: written(stale, 3), lambda: folders.complete_checkpoint(unfinished, 2, "{}")):
        with pytest.raises(StaleAttempt):
            write()
    assert (tmp_path / "global_step_2" / "actor" / "weights").read_text() == "new"
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "2\n"
    assert list(folders.checkpoints(tmp_path)) == [1, 2]


@pytest.mark.parametrize("moment", ["before the rename", "before the pointer", "after the last check"])
def test_an_attempt_that_is_overtaken_late_does_not_move_the_pointer(tmp_path: Path, monkeypatch, moment: str):
    """It was paused in the middle of completing its checkpoint, for as long as the next attempt took to begin."""
    stale = Attempt.claim(tmp_path)
    unfinished = written(stale, 2)
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
    assert not (tmp_path / "latest_checkpointed_iteration.txt").exists()


def test_an_attempt_removes_only_what_it_and_earlier_ones_left(tmp_path: Path):
    stale = Attempt.claim(tmp_path)
    left = written(stale, 1)
    newest = Attempt.claim(tmp_path)
    writing = written(newest, 1)
    folders.remove_unfinished(tmp_path, stale.number)
    assert writing.is_dir() and not left.exists()
    assert [path for path in tmp_path.iterdir() if path.name != ".attempt"] == [writing]


class Writers:
    """Workers whose files are there at once; before they are asked whether they have finished, something happens."""

    def __init__(self, meanwhile: Callable[[], object]) -> None:
        self.meanwhile = meanwhile

    def run(self, method: str, *arguments: object) -> list[object]:
        if method == "save":
            (folder,) = (argument for argument in arguments if isinstance(argument, Path))
            (folder / "actor").mkdir()
            (folder / "actor" / "weights").write_text("weights")
            return [None]
        self.meanwhile()
        return [{}]


def test_old_checkpoints_are_not_removed_by_a_stale_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    stale = Attempt.claim(tmp_path)
    for step in (1, 2):
        folders.complete_checkpoint(written(stale, step), step, "{}")
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
