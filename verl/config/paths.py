"""Relative paths that a user types: those of the working directory, else those of the folder that the shell was in."""

import os
from pathlib import Path

SHELL_FOLDER = "VERL_SHELL_FOLDER"
"""Where train.sh or eval.sh was called, which change to their checkout."""


def _elsewhere(path: str) -> Path | None:
    """Where a relative path leads from the shell's folder; None if that is the working directory, or not known."""
    folder = os.environ.get(SHELL_FOLDER)
    if not folder or not path or os.path.isabs(path) or Path(folder) == Path.cwd():
        return None
    return Path(folder, path)


def find_path(path: str) -> str:
    """``path`` itself if there is such a file or folder, or nothing of that name where the shell is either; otherwise
    its full path there."""
    there = _elsewhere(path)
    # os.path: a name that no file can have, such as one with a NUL, is another's to refuse.
    return str(there) if there and not os.path.exists(path) and os.path.exists(there) else path


def places(path: str) -> str:
    """Where a missing ``path`` was looked for, for a message."""
    here, there = Path.cwd() / path, _elsewhere(path)
    return f"neither {here} nor {there}" if there else f"{here}"
