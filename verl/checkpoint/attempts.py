"""Allows only the newest attempt and, with a lock, only one process at a time to write to a run's folder.

Each restart or requeue of a run is a new attempt. The file ``.attempt`` in the run's folder contains the number of the
newest attempt, which never decreases. A process of an earlier attempt may still be alive on a machine that was paused
or lost its network connection. Writes by a process with an outdated attempt number are refused.
"""

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from verl.config.errors import ConfigError
from verl.utils.files import open_to_write, replace_text

LOCK = ".lock"
"""Empty file that a process locks to use a run's folder. Folders with only this file and ``ATTEMPT`` count as empty."""

ATTEMPT = ".attempt"
"""File in a run's folder that contains the number of the newest attempt."""

WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""Error codes of file systems without locks, where a second process cannot be prevented from writing."""


class StaleAttempt(RuntimeError):
    """Raised when a newer attempt has taken over the run's folder."""


@dataclass(frozen=True)
class Attempt:
    """One attempt of the run in ``root``."""

    root: Path
    number: int
    """Attempt number, counted from 1."""

    @classmethod
    def claim(cls, root: Path) -> "Attempt":
        """Take over the folder from earlier attempts. The caller must hold the run's lock.

        Raises ``ConfigError`` if the folder is not writable, for example because the disk is full.
        """
        try:
            attempt = cls(root, newest_attempt(root) + 1)
            replace_text(root / ATTEMPT, f"{attempt.number}\n")
        except OSError as error:
            raise _unwritable(root, error) from error
        except ValueError as error:
            raise ConfigError(f"{root / ATTEMPT}: is damaged; write the number of attempts so far into it") from error
        return attempt

    def check(self, path: Path) -> None:
        """Check that no newer attempt has taken over. Call this method before writing ``path``.

        Raises ``StaleAttempt`` if this is not the newest attempt.
        """
        newest = newest_attempt(self.root)
        if newest != self.number:
            raise StaleAttempt(
                f"{path}: not written by attempt {self.number}, since attempt {newest} has taken over {self.root}"
            )


def newest_attempt(root: Path) -> int:
    """Return the number in the folder's ``.attempt`` file, or 0 if the file is missing."""
    try:
        return int((root / ATTEMPT).read_text())
    except FileNotFoundError:
        return 0


@contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Create ``folder`` and lock it for the block's duration. The lock is also released if the process is killed.

    Raises ``ConfigError`` if another process has the lock, or if the folder is not writable.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.fdopen(open_to_write(folder / LOCK, os.O_WRONLY), "wb")
    except OSError as error:
        raise _unwritable(folder, error) from error
    with lock as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"trainer.default_local_dir={str(folder)!r}: another run is using this folder; wait until it ends or "
                "name another folder"
            ) from None
        except OSError as error:
            if error.errno not in WITHOUT_LOCKS:
                raise
        yield


def _unwritable(folder: Path, error: OSError) -> ConfigError:
    field = f"trainer.default_local_dir={str(folder)!r}"
    return ConfigError(f"{field}: cannot be written ({error.strerror}); name another folder")
