"""Who may write into a run's folder: one process at a time by its lock, and only the newest attempt.

A run that is requeued or restarted is the same run in another attempt. The file ``.attempt`` in its folder holds the
number of the newest one, which never decreases. A process of an earlier attempt may still be alive, on a machine that
lost its network or was paused; whatever it then writes carries its attempt's number and is refused.
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
"""Empty file by which a process locks a run's folder; a folder with nothing but this and ``ATTEMPT`` is free."""

ATTEMPT = ".attempt"
"""File in a run's folder with the number of the newest attempt at the run."""

WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""Errors of file systems without locks; there, a second process cannot be kept out."""


class StaleAttempt(RuntimeError):
    """A newer attempt has taken over the run's folder."""


@dataclass(frozen=True)
class Attempt:
    """One attempt at the run in ``root``."""

    root: Path
    number: int
    """Counted from 1."""

    @classmethod
    def claim(cls, root: Path) -> "Attempt":
        """Take the folder over from earlier attempts; the caller holds the run's lock.

        Raises:
            ConfigError: the folder cannot be written, as on a full disk.
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
        """Raise if another attempt has taken over; called before ``path`` is written.

        Raises:
            StaleAttempt: this is not the newest attempt.
        """
        newest = newest_attempt(self.root)
        if newest != self.number:
            raise StaleAttempt(
                f"{path}: not written by attempt {self.number}, since attempt {newest} has taken over {self.root}"
            )


def newest_attempt(root: Path) -> int:
    """Return the number in the folder's ``.attempt`` file; 0 if there is none."""
    try:
        return int((root / ATTEMPT).read_text())
    except FileNotFoundError:
        return 0


@contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Create ``folder`` and lock it for this process; the lock ends with the process, even if that is killed.

    Raises:
        ConfigError: another process holds the lock, or the folder cannot be written.
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
