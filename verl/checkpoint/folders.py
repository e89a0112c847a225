"""Manages checkpoints on disk, which are written atomically and verified before use.

``<run>/global_step_<N>/`` is written under a temporary name. The folder is renamed once all files are on disk and their
sizes and checksums are in ``manifest.json``. ``latest_checkpointed_iteration.txt`` contains the latest step.
"""

import json
import re
import shutil
import uuid
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from verl.checkpoint.attempts import Attempt
from verl.config.errors import ConfigError
from verl.utils.files import FileRecord, file_record, flush, replace_text, unreadable, write_recorded
from verl.utils.process import available_cores

POINTER = "latest_checkpointed_iteration.txt"
MANIFEST = "manifest.json"
STATE = "trainer_state.json"
FORMAT = 2
"""Format version in the manifest, increased when a change to the trainer state makes older checkpoints unusable."""
READ_SUFFIXES = (".safetensors", ".json")
"""Suffixes of the files that are read when a run resumes."""
EXPORTED = "huggingface"
"""Folder of a model in ``transformers`` format, which may be added to a checkpoint later."""
_NAME = re.compile(r"global_step_(\d+)")
_ATTEMPT = re.compile(r"\.attempt_(\d+)\.")


class DamagedCheckpoint(ConfigError):
    """Raised if a file of a checkpoint is missing or was changed after it was written. The message names the file."""


def begin_checkpoint(attempt: Attempt, step: int) -> Path:
    """Create a folder for the checkpoint of ``step``, with the attempt number in the folder's name.

    Folders differ between attempts, so a worker that outlives its attempt cannot write to a newer attempt's folder.
    Raises ``StaleAttempt`` if a newer attempt has taken over.
    """
    folder = attempt.root / f".global_step_{step}.attempt_{attempt.number}.{uuid.uuid4().hex[:8]}.unfinished"
    attempt.check(folder)
    folder.mkdir(parents=True)
    return folder


def attempt_of(folder: Path) -> Attempt:
    """Return the attempt that created a folder with :func:`begin_checkpoint`."""
    match = _ATTEMPT.search(folder.name)
    assert match is not None, f"{folder}: not a folder of begin_checkpoint"
    return Attempt(folder.parent, int(match[1]))


def complete_checkpoint(folder: Path, step: int, state: str, records: Mapping[str, FileRecord] | None = None) -> Path:
    """Rename a folder created by :func:`begin_checkpoint` to ``global_step_<step>``.

    An existing checkpoint with this name is replaced.

    Args:
        state: Trainer state to write to ``trainer_state.json``.
        records: Sizes and checksums computed while writing. Files without a record are read to compute it.

    Raises:
        RuntimeError: If a file that was written is not in ``folder``, because a machine does not share the folder.
        StaleAttempt: If a newer attempt has taken over.
    """
    attempt, root = attempt_of(folder), folder.parent
    attempt.check(folder)
    if not any(folder.glob("actor/*")):
        raise RuntimeError(f"{folder}: no worker wrote the model there; all machines must share {root}")
    known = {STATE: write_recorded(folder / STATE, state.encode())} | dict(records or {})
    files = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    if missing := known.keys() - files.keys():
        raise RuntimeError(f"{folder}: {min(missing)} was written elsewhere; all machines must share {root}")
    entries = {name: asdict(known.get(name) or file_record(path)) for name, path in files.items()}
    manifest = {"format": FORMAT, "attempt": attempt.number, "files": entries}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    for path in [*folder.rglob("*"), folder]:
        flush(path)
    final = root / f"global_step_{step}"
    # An attempt that starts after this point renames this folder, so that the rename below fails.
    attempt.check(final)
    if final.exists():
        _discard(final)
    folder.rename(final)
    flush(root)
    attempt.check(root / POINTER)
    replace_text(root / POINTER, f"{step}\n")
    return final


def verify_checkpoint(folder: Path) -> None:
    """Compare every file of a checkpoint with the manifest, using one thread per core.

    Raises:
        DamagedCheckpoint: If a file is missing, has a different size or content, or cannot be read.
        ConfigError: If a file that would be read when resuming is not listed in the manifest.
    """
    if reason := unreadable(sorted(folder.rglob("*"))):
        raise DamagedCheckpoint(reason)
    expected = _read_files(folder / MANIFEST)
    for name, record in expected.items():
        path = folder / name
        if not path.is_file():
            raise DamagedCheckpoint(f"{path} is missing")
        size = path.stat().st_size
        if size != record.size:
            raise DamagedCheckpoint(f"{path} has {size} bytes instead of the {record.size} that were written")
    foreign = _first_foreign(folder, expected.keys())
    if foreign is not None:
        raise ConfigError(f"{foreign} is not listed in {MANIFEST}, so it does not belong to this checkpoint; remove it")
    # Sizes were compared first, because that is cheap, whereas checksums require reading all data.
    readers = ThreadPoolExecutor(available_cores(), thread_name_prefix="verify")
    try:
        for damage in readers.map(_damage, [folder / name for name in expected], expected.values()):
            if damage:
                raise DamagedCheckpoint(damage)
    finally:
        readers.shutdown(cancel_futures=True)


def _damage(path: Path, record: FileRecord) -> str:
    """Return an error message if a file does not match its manifest record, otherwise an empty string."""
    try:
        return "" if file_record(path) == record else f"{path} was altered: its checksum differs from the manifest"
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"


def check_format(folder: Path) -> None:
    """Raise ``ConfigError`` if an incompatible version of VERL wrote the state in a verified checkpoint."""
    if json.loads((folder / MANIFEST).read_text()).get("format") != FORMAT:
        raise ConfigError(
            f"{folder}: written by an earlier version of VERL, so it cannot be resumed; export its model, `verl-export "
            f"{folder}`, and start a new run from it: model.path={folder}/actor/{EXPORTED}"
        )


def refuse_verl_shards(named: str, part: Path) -> None:
    """Raise a ``ConfigError`` starting with ``named`` if ``part`` of a veRL checkpoint has only sharded weights."""
    if any(part.glob("model_world_size_*_rank_0.pt")) and not any((part / EXPORTED).glob("*.safetensors")):
        raise ConfigError(
            f"{named}: a checkpoint of veRL whose model is in shards; merge them where veRL is installed, `python -m "
            f"verl.model_merger merge --backend fsdp --local_dir {part} --target_dir merged`, and set model.path=merged"
        )


def _read_files(manifest: Path) -> dict[str, FileRecord]:
    """Return a manifest's records by file name, or raise ``DamagedCheckpoint`` if it is invalid."""
    try:
        entries = json.loads(manifest.read_text())["files"]
        expected = {name: FileRecord(**entry) for name, entry in entries.items()}
    except OSError as error:
        raise DamagedCheckpoint(f"{manifest} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DamagedCheckpoint(f"{manifest} is damaged") from error
    if outside := next((name for name in expected if ".." in Path(name).parts or Path(name).is_absolute()), None):
        raise DamagedCheckpoint(f"{manifest} is damaged: it lists {outside}, which is elsewhere")
    if STATE not in expected:
        raise DamagedCheckpoint(f"{manifest} is damaged: it does not list {STATE}")
    return expected


def _first_foreign(folder: Path, names: Collection[str]) -> Path | None:
    """Return the first file that a resumed run would read but that the manifest does not list, or None."""
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        exported = any(part.startswith((EXPORTED, f".{EXPORTED}")) for part in name.parts)
        if path.suffix in READ_SUFFIXES and not exported and name.as_posix() not in {*names, MANIFEST}:
            return path
    return None


def read_state(folder: Path) -> dict[str, Any]:
    """Return a checkpoint's trainer state, or raise ``DamagedCheckpoint`` if the state's file is invalid."""
    path = folder / STATE
    try:
        state = json.loads(path.read_text())
    except OSError as error:
        raise DamagedCheckpoint(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpoint(f"{path} is damaged") from error
    if not isinstance(state, dict):
        raise DamagedCheckpoint(f"{path} is damaged: it is not a mapping")
    return state


def step_of(folder: Path) -> int | None:
    """Return the step in the name of a checkpoint folder, or None for any other name."""
    match = _NAME.fullmatch(folder.name)
    return int(match[1]) if match else None


def checkpoints(root: Path) -> dict[int, Path]:
    """Return the folders of a run's checkpoints by step, oldest first, without verifying the checkpoints."""
    steps = ((step_of(folder), folder) for folder in root.glob("global_step_*") if folder.is_dir())
    return dict(sorted((step, folder) for step, folder in steps if step is not None))


def latest_checkpoint(root: Path) -> Path | None:
    """Return the folder of a run's latest checkpoint, without verifying it, or None if there is no checkpoint."""
    return next(reversed(checkpoints(root).values()), None)


def remove_unfinished(root: Path, attempt: int | None = None) -> None:
    """Remove unfinished checkpoints of ``attempt`` and earlier attempts, or of all attempts if ``attempt`` is None.

    An earlier attempt may still be writing or completing one of these checkpoints.
    """
    for folder in root.glob(".global_step_*.unfinished"):
        match = _ATTEMPT.search(folder.name)
        if attempt is None or match is None or int(match[1]) <= attempt:
            with suppress(FileNotFoundError):
                _discard(folder)


def remove_checkpoints(root: Path, keep: Collection[int]) -> None:
    """Remove all checkpoints of a run except those of the steps in ``keep``."""
    for step, folder in checkpoints(root).items():
        if step not in keep:
            _discard(folder)


def _discard(folder: Path) -> None:
    # Rename the folder first, so that a run that dies during the removal leaves no damaged checkpoint.
    name = folder.name.removeprefix(".").removesuffix(".unfinished")
    doomed = folder.with_name(f".{name}.{uuid.uuid4().hex[:8]}.unfinished")
    folder.rename(doomed)
    # A file that cannot be removed, such as an open file on NFS, must not end the run; `remove_unfinished` tries again.
    shutil.rmtree(doomed, ignore_errors=True)


def steps_to_keep(
    steps: Collection[int], newest: int, always: Collection[int], scores: Mapping[int, float]
) -> set[int]:
    """Return the steps whose checkpoints are kept.

    Args:
        newest: Number of newest checkpoints to keep, or 0 to keep all checkpoints.
        always: Steps whose checkpoints are always kept.
        scores: Step -> validation score. The checkpoint with the best score is kept (the first one in a tie).
    """
    ordered = sorted(steps)
    if not newest:
        return set(ordered)
    kept = {*ordered[-newest:], *(step for step in ordered if step in always)}
    scored = [step for step in ordered if step in scores]
    return kept | ({max(scored, key=lambda step: scores[step])} if scored else set())
