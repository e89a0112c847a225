"""Relative paths that a user types: in the working directory, else where the shell was; ``data/...`` also in what VERL
ships."""

import os
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]
SHIPPED = _PACKAGE / "shipped" if (_PACKAGE / "shipped").is_dir() else _PACKAGE.parent
"""The folder that holds ``configs/`` and ``data/``: inside an installed package, the checkout otherwise."""

SHELL_FOLDER = "VERL_SHELL_FOLDER"
"""Where train.sh or eval.sh was called, which change to their checkout."""


def _elsewhere(path: str) -> list[Path]:
    """Where a relative path may lead besides the working directory."""
    if not path or os.path.isabs(path):
        return []
    folders = [Path(folder)] if (folder := os.environ.get(SHELL_FOLDER)) else []
    if Path(path).parts[:1] == ("data",):
        folders.append(SHIPPED)
    return [folder / path for folder in folders if folder != Path.cwd()]


def find_path(path: str) -> str:
    """``path`` itself if there is such a file or folder, or nothing of that name elsewhere either; otherwise its full
    path there."""
    # os.path: a name that no file can have, such as one with a NUL, is another's to refuse.
    if os.path.exists(path):
        return path
    return next((str(there) for there in _elsewhere(path) if os.path.exists(there)), path)


def places(path: str) -> str:
    """Where a missing ``path`` was looked for, for a message."""
    looked = [str(Path.cwd() / path), *map(str, _elsewhere(path))]
    return f"neither {' nor '.join(looked)}" if len(looked) > 1 else looked[0]
