"""Files of Ray that only this user may read, while those of the run keep the user's own permissions."""

import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

VARIABLE = "VERL_UMASK"
"""Tells processes that start under a stricter mask which one the user has; scripts/cluster.sh sets it too."""
PRIVATE = 0o077


@contextmanager
def private_files() -> Iterator[None]:
    """Within the block, what this process and those it starts create is this user's alone."""
    # First, so that no process starts under the stricter mask without knowing the user's.
    before = os.umask(PRIVATE)
    os.umask(before)
    os.environ.setdefault(VARIABLE, f"{before:o}")
    os.umask(PRIVATE)
    try:
        yield
    finally:
        os.umask(before)


def restore_umask() -> None:
    """Create files with the user's own permissions again, in a process that started within such a block."""
    if VARIABLE in os.environ:
        os.umask(int(os.environ[VARIABLE], 8))


def private_folder() -> Path:
    """This user's own folder for the temporary files of Ray, which lets everyone write into those that it makes.

    Its path is short: Ray's sockets lie below, and the system limits their paths to about a hundred characters.
    """
    folder = Path(os.environ.get("RAY_TMPDIR", "/tmp"), f"verl-{os.getuid()}")  # noqa: S108
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        make_private(folder)
        found = folder.lstat()
    except OSError:
        return Path(tempfile.mkdtemp(prefix="verl-"))
    # Somebody else may have made it, to see what is written there.
    own = found.st_uid == os.getuid() and stat.S_ISDIR(found.st_mode) and not found.st_mode & PRIVATE
    return folder if own else Path(tempfile.mkdtemp(prefix="verl-"))


def make_private(path: Path) -> None:
    """Take all permissions but this user's from a file or folder of this user; one of another user stays as it is."""
    with suppress(OSError):
        mode = path.stat().st_mode & 0o777
        if mode & PRIVATE and path.stat().st_uid == os.getuid():
            path.chmod(mode & ~PRIVATE)
