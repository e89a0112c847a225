"""Finds relative paths in the working directory, the calling shell's directory or (``data/...``) shipped files."""

import os
import re
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]
SHIPPED = _PACKAGE / "shipped" if (_PACKAGE / "shipped").is_dir() else _PACKAGE.parent
"""Folder that contains ``configs/`` and ``data/``, either inside the installed package or the checkout."""

_CHECKPOINT = re.compile(r"global_step_(\d+)")

SHELL_FOLDER = "VERL_SHELL_FOLDER"
"""Environment variable with the caller's working directory, because train.sh and eval.sh change to their checkout."""


def _elsewhere(path: str) -> list[Path]:
    """Return the folders other than the working directory in which to look for a relative path."""
    if not path or os.path.isabs(path):
        return []
    folders = [Path(folder)] if (folder := os.environ.get(SHELL_FOLDER)) else []
    if Path(path).parts[:1] == ("data",):
        folders.append(SHIPPED)
    return [folder / path for folder in folders if folder != Path.cwd()]


def find_path(path: str) -> str:
    """Return the full path of a file or folder found outside the working directory; otherwise ``path`` unchanged."""
    # os.path.exists tolerates invalid names, such as names with a NUL, which other code rejects later.
    if os.path.exists(path):
        return path
    return next((str(there) for there in _elsewhere(path) if os.path.exists(there)), path)


def find_model(path: str) -> str:
    """Like :func:`find_path`, but return the exported model of a checkpoint, or of a run's newest checkpoint."""
    path = find_path(path)
    if os.path.exists(os.path.join(path, "config.json")):
        return path
    named = ((_CHECKPOINT.fullmatch(folder.name), folder) for folder in [Path(path), *Path(path).glob("global_step_*")])
    steps = {int(match[1]): folder for match, folder in named if match and folder.is_dir()}
    return str(steps[max(steps)] / "actor" / "huggingface") if steps else path


def places(path: str) -> str:
    """Return a message that lists the places searched for a missing ``path``."""
    looked = [str(Path.cwd() / path), *map(str, _elsewhere(path))]
    return f"neither {' nor '.join(looked)}" if len(looked) > 1 else looked[0]
