"""Atomic file writes and file checksums."""

import errno
import hashlib
import io
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from verl.config.errors import ConfigError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


FIXES = dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "make room")
FIXES |= dict.fromkeys((errno.EROFS, errno.EIO, errno.ESTALE, errno.ENOENT), "make it writable")
"""Maps error numbers of storage failures to suggested fixes. ``ENOENT`` counts only if the folder is missing too."""


def storage_line(error: BaseException, folder: Path | None = None, needed: int = 0) -> str:
    """Return a line that describes a storage failure, or an empty string if ``error`` has another cause.

    The line contains the path, the free space and, if ``needed`` (in bytes) is not 0, the required space. The path is
    ``folder`` or, by default, the path in the error.
    """
    causes: list[BaseException | None] = [error]
    for seen in causes:
        # Errors of Rust contain the number as text; torch.distributed.checkpoint collects the errors of its ranks.
        text, failures = re.search(r"\(os error (\d+)\)", str(seen)), getattr(seen, "failures", None)
        number = getattr(seen, "errno", None) or (int(text[1]) if text else 0)
        named = Path(str(getattr(seen, "filename", None) or folder or "."))
        if number in FIXES and (number != errno.ENOENT or not named.parent.exists()):
            path = folder or named
            free = shutil.disk_usage(next(each for each in (path, *path.absolute().parents) if each.exists())).free
            sizes = f"{needed / 1e6:,.1f} MB needed, " * bool(needed) + f"{free / 1e6:,.1f} MB free"
            return f"{path}: cannot be written ({os.strerror(number)}, {sizes}); {FIXES[number]}, and start it again"
        if seen is not None:
            causes += [seen.__cause__ or seen.__context__]
            causes += [entry[0] for entry in failures.values()] if isinstance(failures, dict) else []
    return ""


@contextmanager
def naming_storage(folder: Path | None, needed: int = 0) -> Iterator[None]:
    """Convert a storage failure inside the block to a ``ConfigError`` with the message from :func:`storage_line`."""
    try:
        yield
    except BaseException as error:  # as torch.distributed.checkpoint raises
        if isinstance(error, ConfigError | KeyboardInterrupt | SystemExit) or not (
            line := storage_line(error, folder, needed)
        ):
            raise
        raise ConfigError(line) from error


@dataclass(frozen=True)
class FileRecord:
    """A file's entry in a manifest."""

    size: int
    """Size in bytes."""
    sha256: str
    """Hexadecimal SHA-256 digest of the content."""


class RecordedFile(io.BufferedWriter):
    """New file that is written sequentially and computes its record on the fly, without being read again."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path, "w"))
        self._digest, self._size = hashlib.sha256(), 0

    def write(self, content: "ReadableBuffer", /) -> int:
        """Append ``content``."""
        self._digest.update(content)
        self._size += memoryview(content).nbytes
        return super().write(content)

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Raise ``io.UnsupportedOperation``, because data that has been written must not change."""
        raise io.UnsupportedOperation("seek")

    @property
    def record(self) -> FileRecord:
        """Record of the data written so far."""
        return FileRecord(self._size, self._digest.hexdigest())


def write_recorded(path: Path, content: bytes) -> FileRecord:
    """Write a new file and return its record."""
    with RecordedFile(path) as file:
        file.write(content)
    return file.record


def file_record(path: Path) -> FileRecord:
    """Read the file ``path`` and return its record."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return FileRecord(path.stat().st_size, digest)


LARGEST_TEXT = 1 << 29
"""Maximum size in bytes of text files (see ``TEXT_SUFFIXES``), because they are read into memory as a whole."""
TEXT_SUFFIXES = (".json", ".txt", ".yaml", ".jinja", ".model", ".py")


def unreadable(paths: Iterable[Path]) -> str:
    """Return why one of the untrusted files in ``paths`` must not be opened, or an empty string if all are safe.

    Opening a pipe blocks until there is a writer, reading a device may never end, and large texts could exhaust memory.
    """
    for path in paths:
        try:
            status = path.stat()
        except OSError:
            continue  # a dangling link, which the code that reads it reports as missing
        if stat.S_ISDIR(status.st_mode):
            continue
        if not stat.S_ISREG(status.st_mode):
            return f"{path} is not a regular file"
        if path.suffix in TEXT_SUFFIXES and status.st_size > LARGEST_TEXT:
            return f"{path} has {status.st_size} bytes, too many for a {path.suffix} file"
    return ""


def print_to(path: Path, *descriptors: int) -> None:
    """Redirect this process's ``descriptors``, such as 1 for standard output, to the end of the file ``path``."""
    file = open_to_write(path, os.O_WRONLY | os.O_APPEND)
    for descriptor in descriptors:
        os.dup2(file, descriptor)
    os.close(file)


def open_to_write(path: Path, flags: int) -> int:
    """Open or create the regular file ``path`` and return its descriptor. ``flags`` are passed to ``os.open``.

    If another user owns the folder, ``path`` could be a symbolic link to another file, or a pipe that blocks.

    Raises ``OSError`` if the path is not a regular file.
    """
    handle = os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "Not a regular file", str(path))
    return handle


def flush(path: Path) -> None:
    """Flush a file or a folder's entries to disk. A full disk then causes an error before a file is renamed."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path, and move the file to ``path`` at the end of the block if no exception was raised."""
    temporary = path.with_name(f".{path.name}.unfinished")
    # In a folder that belongs to another user, this could be a link to another file.
    temporary.unlink(missing_ok=True)
    try:
        yield temporary
        flush(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    flush(path.parent)


def replace_text(path: Path, text: str) -> None:
    """Write ``text`` atomically: ``path`` has either the old or the new content, even if the process is killed."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def free_name(path: Path, suffix: str, first: int = 1) -> Path:
    """Return an unused path that ends with ``suffix`` and the first free number, such as ``metrics.jsonl.1``."""
    names = (path.with_name(f"{path.name}{suffix}{number}") for number in count(first))
    return next(name for name in names if not os.path.lexists(name))


def damaged_name(path: Path) -> Path:
    """Return an unused path to rename ``path`` to: ``<name>.damaged``, ``<name>.damaged_2`` and so on."""
    name = path.with_name(f"{path.name}.damaged")
    return free_name(name, "_", 2) if os.path.lexists(name) else name
