"""The lock of a run's folder: one process at a time works in it."""

import errno
import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from verl.checkpoint.run_start import LOCK
from verl.config.errors import ConfigError

WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""Errors of file systems without locks; there, a second process cannot be kept out."""


@contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Create ``folder`` and lock it for this process; the lock ends with the process, even if that is killed.

    Raises:
        ConfigError: another process holds the lock, or the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / LOCK).open("w")
    except OSError as error:
        raise ConfigError(
            f"trainer.default_local_dir={str(folder)!r}: cannot be written ({error.strerror}); name another folder"
        ) from error
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
