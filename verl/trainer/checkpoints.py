"""Checkpoints that are either complete under their final name or not there at all."""

import json
import os
import shutil
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

POINTER = "latest_checkpointed_iteration.txt"


def save_checkpoint(root: Path, step: int, write: Callable[[Path], object], state: Mapping[str, Any]) -> Path:
    """Write ``root/global_step_<step>``.

    Args:
        root: the run's folder.
        write: writes the models below the folder it is given, the policy's in ``actor/``.
        state: the trainer's own state, stored as JSON in ``trainer_state.json``.

    Everything is written under a temporary name, flushed to disk, and renamed when complete; the pointer file changes
    last. Whatever fails, the temporary folder is removed and the error goes on: earlier checkpoints stay as they were.
    """
    final, temporary = root / f"global_step_{step}", root / f".global_step_{step}.unfinished"
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        write(temporary)
        if not any(temporary.rglob("actor/*")):
            raise RuntimeError(f"{temporary}: no worker wrote the model there; all machines must share {root}")
        (temporary / "trainer_state.json").write_text(json.dumps(state, indent=2) + "\n")
        _flush(temporary)
        temporary.rename(final)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    _replace_text(root / POINTER, f"{step}\n")
    return final


def remove_checkpoints(root: Path, keep: Collection[int]) -> None:
    """Remove the run's checkpoints but those of the steps in ``keep``."""
    kept = {f"global_step_{step}" for step in keep}
    for folder in root.glob("global_step_*"):
        if folder.name not in kept:
            shutil.rmtree(folder)


def latest_checkpoint(root: Path) -> Path | None:
    """The newest complete checkpoint's folder, or ``None``."""
    pointer = root / POINTER
    return root / f"global_step_{int(pointer.read_text())}" if pointer.exists() else None


def _flush(folder: Path) -> None:
    """Ask the disk for every file now: a full disk must show before the rename, not after."""
    for path in [*folder.rglob("*"), folder]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _replace_text(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.unfinished")
    try:
        temporary.write_text(text)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
