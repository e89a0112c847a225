"""Files of Ray that only this user may read, while those of the run keep the user's own permissions."""

import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from verl.config.errors import ConfigError
from verl.utils.process import UMASK

PRIVATE = 0o077
LONGEST_FOLDER = 107 - len("/ray/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store")
"""Characters of the private folder: the system allows 107 for the path of a socket."""


@contextmanager
def private_files() -> Iterator[None]:
    """Within the block, what this process and those it starts create is this user's alone."""
    # First, so that no process starts under the stricter mask without knowing the user's.
    before = os.umask(PRIVATE)
    os.umask(before)
    os.environ.setdefault(UMASK, f"{before:o}")
    os.umask(PRIVATE)
    try:
        yield
    finally:
        os.umask(before)


def private_folder() -> Path:
    """This user's own folder for the temporary files of Ray, which lets everyone write into those that it makes.

    It is in RAY_TMPDIR, or in /tmp.

    Raises:
        ConfigError: its path is too long for Ray's sockets, which lie below.
    """
    parent = Path(os.environ.get("RAY_TMPDIR") or "/tmp").absolute()  # noqa: S108
    folder = parent / f"verl-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Somebody else may have made it, to see what is written there, or a link, which would change another folder.
        if not folder.is_symlink():
            make_private(folder)
        status = folder.lstat()
        private = status.st_uid == os.getuid() and stat.S_ISDIR(status.st_mode) and not status.st_mode & PRIVATE
        folder = folder if private else Path(tempfile.mkdtemp(prefix="verl-", dir=parent))
    except OSError:
        folder = Path(tempfile.mkdtemp(prefix="verl-"))
    if len(os.fsencode(folder)) > LONGEST_FOLDER:
        raise ConfigError(
            f"{folder}: Ray's sockets below it would have longer paths than the system allows; set RAY_TMPDIR to a "
            f"folder of at most {LONGEST_FOLDER - len(folder.name) - 1} characters"
        )
    return folder


def make_private(path: Path) -> None:
    """Take all permissions but this user's from a file or folder of this user; one of another user stays as it is."""
    with suppress(OSError):
        mode = path.stat().st_mode & 0o777
        if mode & PRIVATE and path.stat().st_uid == os.getuid():
            path.chmod(mode & ~PRIVATE)
