"""Files that are written whole or not at all, and what identifies their content."""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class FileRecord:
    """What a manifest says of a file."""

    size: int
    """Bytes."""
    sha256: str
    """Hexadecimal digest of its content."""


def file_record(path: Path) -> FileRecord:
    """Size and checksum of what ``path`` holds now."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return FileRecord(path.stat().st_size, digest)


def flush(path: Path) -> None:
    """Ask the disk for a file or a folder's entries now: a full disk must show before a rename, not after."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path beside ``path``, which it replaces at the end unless an error is raised."""
    temporary = path.with_name(f".{path.name}.unfinished")
    try:
        yield temporary
        flush(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    flush(path.parent)


def replace_text(path: Path, text: str) -> None:
    """Write ``text`` so that whenever the process ends, ``path`` holds either what it held or all of the new text."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
