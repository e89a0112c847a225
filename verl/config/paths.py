"""Relative paths of a user: in the working directory, else in the shell's; ``data/...`` also in the shipped files."""

import os
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]
SHIPPED = _PACKAGE / "shipped" if (_PACKAGE / "shipped").is_dir() else _PACKAGE.parent
"""The folder that holds ``configs/`` and ``data/``: inside an installed package, the checkout otherwise."""

SHELL_FOLDER = "VERL_SHELL_FOLDER"
"""Variable with the working directory of the caller of train.sh or eval.sh, which change to their checkout."""


def _elsewhere(path: str) -> list[Path]:
    """Return the paths that a relative path may mean, other than in the working directory."""
    if not path or os.path.isabs(path):
        return []
    folders = [Path(folder)] if (folder := os.environ.get(SHELL_FOLDER)) else []
    if Path(path).parts[:1] == ("data",):
        folders.append(SHIPPED)
    return [folder / path for folder in folders if folder != Path.cwd()]


def find_path(path: str) -> str:
    """Return the full path of a file or folder that is only elsewhere (:func:`_elsewhere`); otherwise ``path``."""
    # os.path: a name that no file can have, such as one with a NUL, is another's to refuse.
    if os.path.exists(path):
        return path
    return next((str(there) for there in _elsewhere(path) if os.path.exists(there)), path)


def places(path: str) -> str:
    """Return the places of a missing ``path``, for a message."""
    looked = [str(Path.cwd() / path), *map(str, _elsewhere(path))]
    return f"neither {' nor '.join(looked)}" if len(looked) > 1 else looked[0]
