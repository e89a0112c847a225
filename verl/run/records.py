"""Files of records, one JSON object with a ``step`` per line, and what a resumed run keeps of them."""

import json
import shutil
from pathlib import Path

from verl.config.errors import ConfigError
from verl.utils.files import damaged_name, replace_text


def keep_records(path: Path, last_step: int) -> Path | None:
    """Remove the records of the steps after ``last_step``, and a last line that was only partly written.

    If other lines are damaged, the file is copied first, and its readable records are kept; returns the copy.

    Raises:
        ConfigError: the file cannot be read or copied.
    """
    try:
        lines = path.read_bytes().split(b"\n")
        # The last one, after the last line break, is empty or was cut.
        if _step(lines[-1]) is None:
            lines.pop()
        steps = [_step(line) for line in lines]
        copy = None
        if None in steps:
            copy = damaged_name(path)
            shutil.copy2(path, copy)
        kept = [
            line.decode() for line, step in zip(lines, steps, strict=True) if step is not None and step <= last_step
        ]
        replace_text(path, "".join(f"{line}\n" for line in kept))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read or rewritten: {error.strerror}; move it away") from error
    return copy


def _step(line: bytes) -> int | None:
    """The step of a record; None if the line is none."""
    try:
        record = json.loads(line.decode())
    except (ValueError, RecursionError):
        return None
    step = record.get("step") if isinstance(record, dict) else None
    return step if type(step) is int else None
