"""The folder of a run, which one process works in at a time."""

import errno
import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from verl.config.errors import ConfigError
from verl.config.load import LOCK

WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""What file systems say that have no locks: there nothing keeps a second process out."""


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Make ``folder`` and hold it for this process alone; the lock ends with the process, however that ends.

    Raises:
        ConfigError: another process works in it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"trainer.default_local_dir={str(folder)!r}: another run is at work there; wait for its end, or name "
                "another folder"
            ) from None
        except OSError as error:
            if error.errno not in WITHOUT_LOCKS:
                raise
        yield
