"""Resumes a run: finds and verifies the checkpoint, reports changed options, and checks compatibility."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from verl.checkpoint.digests import changed
from verl.checkpoint.folders import (
    POINTER,
    STATE,
    DamagedCheckpoint,
    check_format,
    checkpoints,
    read_state,
    remove_unfinished,
    step_of,
    verify_checkpoint,
)
from verl.checkpoint.requeue import is_requeued, resume_line
from verl.checkpoint.shards import check_same_architecture, saved_shapes
from verl.config.common import ModelConfig, RunConfig
from verl.config.errors import ConfigError
from verl.config.ppo import PPOConfig
from verl.config.run_file import RUN_CONFIG, read_run_config
from verl.config.sft import SFTConfig
from verl.models.huggingface import empty_model
from verl.models.info import ModelInfo
from verl.models.lora import add_adapters, train_adapters_only
from verl.utils.files import damaged_name, replace_text

NOT_COMPARED = ("trainer.resume_mode", "trainer.resume_from_path", "trainer.default_local_dir")
"""Options whose changes are not reported to the user when a run resumes."""


@dataclass(frozen=True)
class Resumption:
    """The verified checkpoint that a run resumes from."""

    folder: Path
    step: int
    state: Mapping[str, Any]
    """State of the trainer."""


def find_resumption(config: PPOConfig | SFTConfig, say: Callable[[str], None]) -> Resumption | None:
    """Return the verified checkpoint selected by ``trainer.resume_mode``, or None if the run starts from scratch.

    Unfinished checkpoints in the run's folder are removed. With ``auto``, a damaged checkpoint is renamed to
    ``global_step_<N>.damaged``, a warning is printed, and the previous checkpoint is used. Raises ``ConfigError`` if
    ``resume_from_path`` is not an intact checkpoint, or if the run in the folder cannot be resumed. ``ConfigError`` is
    also raised for a checkpoint that has a different format version or contains a file that is not in its manifest.

    Args:
        say: Function that prints a line, called for the checkpoint and for each option that has changed since.
    """
    trainer = config.trainer
    root = Path(trainer.default_local_dir)
    remove_unfinished(root)
    named = trainer.resume_mode == "path" and not (checkpoints(root) and is_requeued(trainer))
    folder = _checkpoint_by_path(trainer, root) if named else _latest_intact(root, say)
    if folder is None:
        if (root / "summary.json").exists():
            raise ConfigError(
                f"trainer.default_local_dir={str(root)!r}: holds a finished run without checkpoints; name another "
                "folder or remove it"
            )
        return None
    check_format(folder)
    step = step_of(folder)
    assert step is not None
    say(f"resuming from {folder}")
    before = folder.parent / RUN_CONFIG
    try:
        for line in changed_options(before, asdict(config)):
            say(f"  {line}")
    except ConfigError as error:
        say(f"warning: {error}; changed options are not reported")
    if folder.parent == root:
        replace_text(root / POINTER, f"{step}\n")
    return Resumption(folder, step, read_state(folder))


def _checkpoint_by_path(trainer: RunConfig, root: Path) -> Path:
    """Verify the checkpoint ``resume_from_path`` and return its folder."""
    folder = Path(trainer.resume_from_path or "").resolve()
    field = f"trainer.resume_from_path={trainer.resume_from_path!r}"
    step = step_of(folder)
    if step is None or not folder.is_dir():
        raise ConfigError(f"{field}: no such checkpoint; name a folder .../global_step_N")
    try:
        verify_checkpoint(folder)
    except DamagedCheckpoint as error:
        raise ConfigError(f"{field}: {error}") from error
    latest = max(checkpoints(root), default=step)
    if folder.parent == root and latest > step:
        raise ConfigError(
            f"{field}: global_step_{latest} in the same folder is newer, and the run would overwrite the records that "
            "led to it; set trainer.default_local_dir to another folder, or remove it"
        )
    return folder


def _latest_intact(root: Path, say: Callable[[str], None]) -> Path | None:
    """Return the latest intact checkpoint in ``root``, and rename damaged checkpoints that are newer."""
    field, damaged = f"trainer.default_local_dir={str(root)!r}", []
    for folder in reversed(checkpoints(root).values()):
        try:
            verify_checkpoint(folder)
        except DamagedCheckpoint as error:
            say(f"warning: {error}; this checkpoint is not used")
            damaged.append(folder)
            continue
        for bad in damaged:
            bad.rename(damaged_name(bad))
        return folder
    if damaged:
        text = f"none of its {len(damaged)} checkpoints is intact; name another folder or remove it"
        raise ConfigError(f"{field}: {text}")
    return None


def changed_options(path: Path, config: Mapping[str, Any]) -> list[str]:
    """Return a line for each option whose value in the file ``path`` differs from its value in ``config``.

    Raises ``ConfigError`` if the file is damaged.
    """
    if not path.is_file():
        return []
    before, now = _flat(read_run_config(path)), _flat(config)
    names = [name for name in sorted(before.keys() | now.keys()) if name not in NOT_COMPARED]
    missing = "(no such option)"
    return [
        f"{name}: was {before.get(name, missing)}, is {now.get(name, missing)}"
        for name in names
        if before.get(name, missing) != now.get(name, missing)
    ]


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, Mapping):
        return {prefix[:-1]: tree}
    return {name: value for key, entry in tree.items() for name, value in _flat(entry, f"{prefix}{key}.").items()}


def best_validation(validations: Mapping[int, Mapping[str, float]], name: str) -> dict[str, Any] | None:
    """Return ``name``, the metric's highest value and the first step that reached it, or None if it has no values.

    Args:
        validations: Step -> metrics of the validation at that step.
    """
    values = {step: metrics[name] for step, metrics in validations.items() if name in metrics}
    step = max(values, key=values.__getitem__, default=None)
    return None if step is None else {"name": name, "value": values[step], "step": step}


def saved_validations(state: Mapping[str, Any]) -> dict[int, dict[str, float]]:
    """Return the validation metrics saved in a checkpoint, keyed by step as an integer."""
    return {int(step): metrics for step, metrics in state["validations"].items()}


def check_unchanged(resumption: Resumption, digests: Mapping[str, str], trainer: RunConfig) -> list[str]:
    """Compare a run's inputs with those of the checkpoint, and return a list of at most one warning about changes.

    Raises ``ConfigError`` if an input that must not change has changed and ``trainer.resume_changed`` is ``refuse``.

    Args:
        digests: Digests of this run's inputs (:func:`verl.checkpoint.digests.run_digests`). Checkpoints written by
            older versions of VERL have no digests and are not compared.
    """
    before = resumption.state.get("digests")
    refused, others = changed(before if isinstance(before, Mapping) else {}, digests)
    text = f"not what {{}} when {resumption.folder} was written"
    if refused and trainer.resume_changed == "refuse":
        raise ConfigError(
            f"{', '.join(refused)}: {text.format('it was' if len(refused) == 1 else 'they were')}, so this would be "
            "another run; restore it, start a new run from the model it holds, or set trainer.resume_changed=warn"
        )
    names = refused + others
    return [f"{', '.join(names)}: {text.format('it was' if len(names) == 1 else 'they were')}"] if names else []


def check_resumable(resumption: Resumption, job: str, num_examples: int, parts: Mapping[str, ModelConfig]) -> None:
    """Check that the checkpoint matches the run.

    Raises ``ConfigError`` if the checkpoint was written by a different job or with different data or models.

    Args:
        job: Name of the job, ``ppo`` or ``sft``.
        num_examples: Size of the training set.
        parts: Configs of the models that training changes: ``actor`` and possibly ``critic`` and ``teacher``.
    """
    folder, state = resumption.folder, resumption.state
    missing = [name for name in ("job", "num_examples") if name not in state]
    if missing:
        raise DamagedCheckpoint(f"{folder / STATE} is damaged: it lacks {', '.join(missing)}; name another checkpoint")
    if state["job"] != job:
        raise ConfigError(f"{folder}: is a checkpoint of main_{state['job']}, not of main_{job}; name another")
    if state["num_examples"] != num_examples:
        raise ConfigError(
            f"data.train_files: {num_examples} examples, but {state['num_examples']} when {folder} was written, so the "
            "position in the data is lost; start a new run from the model it holds"
        )
    for part, model in parts.items():
        shards = folder / part / "shards"
        if not shards.is_dir():
            if part == "teacher":
                fix = "set it and teacher.update_freq to 1, or start a new run from the model it holds"
                raise ConfigError(f"teacher.update_rate: {folder} has no moving average of the policy; {fix}")
            raise ConfigError(f"{folder}: has no {part}; start a new run from the model it holds")
        check_same_architecture(shards, saved_shapes(shards), _trained_shapes(part, model))


def _trained_shapes(part: str, model: ModelConfig) -> dict[str, torch.Size]:
    """Return the shapes of the trained parameters, keyed by name. With adapters, only the adapters are trained."""
    empty = empty_model(part, ModelInfo.of(model))
    if model.trains_adapters:
        add_adapters(empty, model)
        train_adapters_only(empty)
    return {name: parameter.shape for name, parameter in empty.named_parameters() if parameter.requires_grad}


@contextmanager
def resume_hint(trainer: RunConfig) -> Iterator[None]:
    """If the block raises an exception other than ``ConfigError``, print the options for resuming the run to stderr."""
    try:
        yield
    except ConfigError:
        raise
    except BaseException:
        print(resume_line(trainer), file=sys.stderr, flush=True)
        raise
