"""Atomic file writes, and checksums of files."""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class FileRecord:
    """The entry of a file in a manifest."""

    size: int
    """Bytes."""
    sha256: str
    """Hexadecimal digest of its content."""


def file_record(path: Path) -> FileRecord:
    """Size and checksum of the current content of ``path``."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return FileRecord(path.stat().st_size, digest)


def flush(path: Path) -> None:
    """Write a file, or the entries of a folder, to disk now, so that a full disk is noticed before a rename."""
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
    """Write ``text`` atomically: whenever the process ends, ``path`` has either its old content or all of the new."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def damaged_name(path: Path) -> Path:
    """A name beside ``path`` that is free, to set it aside: ``<name>.damaged``, ``<name>.damaged_2`` and so on."""
    names = (path.with_name(f"{path.name}.damaged{suffix}") for suffix in ("", *(f"_{i}" for i in range(2, 1000))))
    return next(name for name in names if not os.path.lexists(name))
