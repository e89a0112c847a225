"""Going on where a run ended: which checkpoint, what differs, and whether there is anything left to do."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from verl.checkpoint.folders import (
    POINTER,
    DamagedCheckpoint,
    checkpoints,
    read_state,
    remove_unfinished,
    step_of,
    verify_checkpoint,
)
from verl.checkpoint.shards import check_same_architecture, saved_shapes
from verl.config.common import ModelConfig, RunConfig
from verl.config.errors import ConfigError
from verl.models.huggingface import empty_model
from verl.models.lora import add_adapters, train_adapters_only
from verl.utils.files import replace_text

Say = Callable[[str], None]

NOT_COMPARED = ("trainer.resume_mode", "trainer.resume_from_path", "trainer.default_local_dir")
"""Options that may differ without anybody being told."""


@dataclass(frozen=True)
class Resumption:
    """The checkpoint that a run goes on from; it has been verified."""

    folder: Path
    step: int
    state: Mapping[str, Any]
    """The trainer's own."""


def find_resumption(config: Any, trainer: RunConfig, say: Say) -> Resumption | None:
    """The checkpoint that ``trainer.resume_mode`` asks for, verified; None where the run starts at its beginning.

    What earlier runs left unfinished in the run's folder is removed. With ``auto`` a damaged checkpoint is set aside
    as ``global_step_<N>.damaged``, with a warning, and the one before it is taken.

    Args:
        config: the run's whole configuration, of which ``trainer`` is a part.
        say: told in lines what is found, and which options differ from those the checkpoint was made with.

    Raises:
        ConfigError: ``resume_from_path`` is no intact checkpoint; or the folder holds a run that cannot go on.
    """
    root = Path(trainer.default_local_dir)
    remove_unfinished(root)
    chosen = _named(trainer, root) if trainer.resume_mode == "path" else _newest(root, say)
    if chosen is None:
        if (root / "summary.json").exists():
            raise ConfigError(
                f"trainer.default_local_dir={str(root)!r}: holds a finished run without checkpoints; name another "
                "folder or remove it"
            )
        return None
    step = step_of(chosen)
    assert step is not None
    say(f"resuming from {chosen}")
    for line in differences(chosen.parent / "config.yaml", asdict(config)):
        say(f"  {line}")
    if chosen.parent == root:
        replace_text(root / POINTER, f"{step}\n")
    return Resumption(chosen, step, read_state(chosen))


def _named(trainer: RunConfig, root: Path) -> Path:
    """``resume_from_path``, if it can be gone on from."""
    folder = Path(trainer.resume_from_path or "").resolve()
    field = f"trainer.resume_from_path={trainer.resume_from_path!r}"
    step = step_of(folder)
    if step is None or not folder.is_dir():
        raise ConfigError(f"{field}: no such checkpoint; name a folder .../global_step_N")
    try:
        verify_checkpoint(folder)
    except DamagedCheckpoint as error:
        raise ConfigError(f"{field}: {error}") from error
    newest = max(checkpoints(root), default=step)
    if folder.parent == root and newest > step:
        raise ConfigError(
            f"{field}: global_step_{newest} beside it is newer, and the run would write over what led to it; set "
            "trainer.default_local_dir to another folder, or remove it"
        )
    return folder


def _newest(root: Path, say: Say) -> Path | None:
    """The newest intact checkpoint in ``root``; damaged ones that are newer are set aside."""
    found = checkpoints(root)
    damaged = []
    for _, folder in sorted(found.items(), reverse=True):
        try:
            verify_checkpoint(folder)
        except DamagedCheckpoint as error:
            say(f"warning: {error}; this checkpoint is not used")
            damaged.append(folder)
            continue
        for bad in damaged:
            bad.rename(_free_name(bad))
        return folder
    if damaged:
        raise ConfigError(
            f"trainer.default_local_dir={str(root)!r}: none of its {len(found)} checkpoints is intact; name another "
            "folder or remove it"
        )
    return None


def _free_name(folder: Path) -> Path:
    names = [folder.with_name(f"{folder.name}.damaged{suffix}") for suffix in ("", *(f"_{i}" for i in range(2, 1000)))]
    return next(name for name in names if not name.exists())


def differences(path: Path, config: Mapping[str, Any]) -> list[str]:
    """One line for each option whose value in the file ``path`` is not that of ``config``."""
    if not path.is_file():
        return []
    before, now = _flat(yaml.safe_load(path.read_text())), _flat(config)
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
    """The name, value and step of the highest ``name`` so far, of equals the first; None without any.

    Args:
        validations: step -> metrics.
    """
    found = {step: metrics[name] for step, metrics in validations.items() if name in metrics}
    if not found:
        return None
    step = max(found, key=lambda step: found[step])
    return {"name": name, "value": found[step], "step": step}


def saved_validations(state: Mapping[str, Any]) -> dict[int, dict[str, float]]:
    """Step -> metrics of the validations before a checkpoint; in JSON their steps are text."""
    return {int(step): metrics for step, metrics in state["validations"].items()}


def check_resumable(resumption: Resumption, job: str, num_examples: int, parts: Mapping[str, ModelConfig]) -> None:
    """Whether the checkpoint fits the run.

    Args:
        job: what wrote it, ``ppo`` or ``sft``.
        num_examples: size of the training set, in whose order the checkpoint has a place.
        parts: ``actor``, and ``critic`` where there is one, with the configured models.

    Raises:
        ConfigError: it is another job's, or its data or models are others.
    """
    folder, state = resumption.folder, resumption.state
    if state["job"] != job:
        raise ConfigError(f"{folder}: is a checkpoint of main_{state['job']} and not of main_{job}; name another")
    if state["num_examples"] != num_examples:
        raise ConfigError(
            f"data.train_files: hold {num_examples} examples, and {state['num_examples']} when {folder} was written: "
            "its place in their order is lost; start a new run from the model it holds"
        )
    for part, model in parts.items():
        shards = folder / part / "shards"
        if not shards.is_dir():
            raise ConfigError(f"{folder}: holds no {part}; start a new run from the model it holds")
        try:
            check_same_architecture(shards, saved_shapes(shards), _trained_shapes(part, model))
        except ValueError as error:
            raise ConfigError(str(error)) from error


def _trained_shapes(part: str, model: ModelConfig) -> dict[str, torch.Size]:
    """Name -> shape of the parameters that are trained: all, or those of the adapters."""
    shell = empty_model(part, model.path, model.trust_remote_code)
    if model.lora.rank:
        add_adapters(shell, model.lora, model.path)
        train_adapters_only(shell)
    return {name: parameter.shape for name, parameter in shell.named_parameters() if parameter.requires_grad}


@contextmanager
def telling_how_to_go_on(trainer: RunConfig) -> Iterator[None]:
    """When the block is left by an exception, say on stderr how the run goes on."""
    try:
        yield
    except ConfigError:
        raise
    except BaseException:
        newest = max(checkpoints(Path(trainer.default_local_dir)), default=None)
        start = "start again; it has no checkpoint yet" if newest is None else f"go on from step {newest}"
        options = [f"trainer.default_local_dir={trainer.default_local_dir}"]
        # Without a checkpoint of its own it starts again from the one that was named.
        if trainer.resume_mode == "disable" or (trainer.resume_mode == "path" and newest is not None):
            options += ["trainer.resume_mode=auto", "trainer.resume_from_path=null"]
        print(f"to {start}: the same command with {' '.join(options)}", file=sys.stderr, flush=True)
        raise
