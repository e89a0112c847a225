"""Resolves relative paths against the working directory or, for ``data/...``, the files shipped with the package."""

import os
import re
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]
SHIPPED = _PACKAGE / "shipped" if (_PACKAGE / "shipped").is_dir() else _PACKAGE.parent
"""Folder that contains ``configs/`` and ``data/``, either in the installed package or in the checkout."""

_CHECKPOINT = re.compile(r"global_step_(\d+)")


def _shipped(path: str) -> Path | None:
    """Return ``data/...`` under ``SHIPPED``, or None for other paths or if ``SHIPPED`` is the working directory."""
    return SHIPPED / path if Path(path).parts[:1] == ("data",) and Path.cwd() != SHIPPED else None


def find_path(path: str) -> str:
    """Return ``path``, or the full path of the shipped file or folder if only that exists."""
    # os.path.exists tolerates invalid names, such as names with a NUL, which other code rejects later.
    shipped = None if os.path.exists(path) else _shipped(path)
    return str(shipped) if shipped and os.path.exists(shipped) else path


def find_model(path: str) -> str:
    """Like :func:`find_path`, but return the exported model of a checkpoint or of a run's newest checkpoint."""
    path = find_path(path)
    if os.path.exists(os.path.join(path, "config.json")):
        return path
    named = ((_CHECKPOINT.fullmatch(folder.name), folder) for folder in [Path(path), *Path(path).glob("global_step_*")])
    steps = {int(match[1]): folder for match, folder in named if match and folder.is_dir()}
    return str(steps[max(steps)] / "actor" / "huggingface") if steps else path


def places(path: str) -> str:
    """Return a message that lists the places searched for a missing ``path``."""
    here, shipped = Path.cwd() / path, _shipped(path)
    return f"neither {here} nor {shipped}" if shipped else str(here)
