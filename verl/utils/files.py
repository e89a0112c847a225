"""Files that are written whole or not at all, and what identifies their content."""

import hashlib
import os
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


def replace_text(path: Path, text: str) -> None:
    """Write ``text`` so that whenever the process ends, ``path`` holds either what it held or all of the new text."""
    temporary = path.with_name(f".{path.name}.unfinished")
    try:
        temporary.write_text(text)
        flush(temporary)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    flush(path.parent)
