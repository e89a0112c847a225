"""Selection of the models to evaluate, which are checkpoints of training runs or standalone models."""

import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from verl.checkpoint.folders import POINTER, checkpoints, step_of
from verl.config.checks import require
from verl.config.errors import ConfigError
from verl.config.evaluation import LAST, EvaluationConfig, TargetConfig
from verl.config.load import parse_values
from verl.config.paths import find_model, find_path
from verl.config.run_file import RUN_CONFIG, read_run_config, run_option
from verl.run.display import RunDisplay
from verl.run.run_config import require_model

MODEL_IN_CHECKPOINT = Path("actor", "huggingface")

PROMPTING: dict[str, tuple[str, Any]] = {
    "template": ("data", "qwen-boxed"),
    "apply_chat_template_kwargs": ("data", {}),
    "max_response_length": ("data", 1536),
    "stop": ("rollout", []),
    "stop_token_ids": ("rollout", []),
}
"""Maps each target option inherited from a run to its group in the run's config and its default value."""

MAX_FOLDER_NAME = 100
"""Maximum length of a result folder's name in characters."""


@dataclass(frozen=True)
class Target:
    """Model to evaluate: a checkpoint of a training run, or a standalone model."""

    run: str
    """Alias of the run, or name of the model."""
    step: int
    """Training step, or 0 for a base model or a standalone model."""
    path: str
    """Model folder or hub id."""
    template: str
    max_response_length: int
    chat_arguments: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Additional arguments for the tokenizer's chat template."""
    stop: tuple[str, ...] = ()
    """Strings that end a response, in addition to the template's stop strings."""
    stop_token_ids: tuple[int, ...] = ()
    folder: str = field(default="", compare=False)
    """Folder of the run, or empty for a standalone model."""

    @property
    def label(self) -> str:
        return f"{self.run}@{self.step}"

    def same_model(self, other: "Target") -> bool:
        """Return whether both targets have the same model and prompting options, ignoring their names."""
        return replace(other, run=self.run, step=self.step) == self and self.chat_arguments == other.chat_arguments


def select_targets(config: EvaluationConfig, display: RunDisplay) -> tuple[list[Target], str]:
    """Return the models selected by ``config``, ordered by run and step, and a name for their result folder.

    Missing models are reported as errors on ``display``.
    """
    found: list[Target] = []
    names: list[str] = []
    entries: Mapping[str, TargetConfig] = config.runs or {"": config.model}
    for alias, entry in entries.items():
        with display.recorded():
            path = entry.path or _newest_or_base(config.runs_dir, entry, display)
            targets, name = _targets_of(alias, path, entry, display)
            found += targets
            names.append(alias or name)
    return found, "+".join(names)[:MAX_FOLDER_NAME]


def newest_run(runs_dir: Path, base: str | None) -> Path | None:
    """Return the run in ``runs_dir`` with the newest checkpoint, considering only runs trained from ``base`` if set."""
    runs = []
    for parent, folders, files in os.walk(runs_dir):
        if POINTER in files:
            folders.clear()
            runs.append(Path(parent))
    if base is not None:
        wanted = Path(base).resolve()
        runs = [run for run in runs if Path(_run_text(run, "model", "path")).resolve() == wanted]
    return max(runs, key=lambda run: (run / POINTER).stat().st_mtime, default=None)


def _newest_or_base(runs_dir: str, entry: TargetConfig, display: RunDisplay) -> str:
    run = newest_run(Path(runs_dir), entry.base and find_model(entry.base))
    if entry.base is None:
        fix = "holds no training run with a checkpoint; name a run or a model"
        require(run is not None, "model.path", None, f"{runs_dir}/ {fix}")
        display.say(f"evaluating the newest run, {run}")
        return str(run)
    if run is None:
        display.say(
            f"note: {runs_dir}/ holds no training run from {entry.base} with a checkpoint; evaluating that model alone "
            "(`bash train.sh` trains it)"
        )
    return entry.base if run is None else str(run)


def _targets_of(alias: str, path: str, entry: TargetConfig, display: RunDisplay) -> tuple[list[Target], str]:
    """Return a config entry's models and a result folder name. Missing steps are reported as errors on ``display``.

    Raises ``ConfigError`` if ``path`` is neither a model nor a training run.
    """
    option = f"runs.{alias}" if alias else "model"
    path = find_path(path)
    root, steps = Path(path), entry.steps

    # A path to a checkpoint folder, or to the exported model inside one, selects that step of its run.
    parts = MODEL_IN_CHECKPOINT.parts
    checkpoint = root.parents[len(parts) - 1] if root.parts[-len(parts) :] == parts else root
    if (only := step_of(checkpoint)) is not None:
        root, steps = checkpoint.parent, [only]
    if not ((root / POINTER).is_file() or any(root.glob("global_step_*"))):
        require_model(f"{option}.path", path)
        name = alias or _as_name(Path(path).resolve().name if root.exists() else root.name)
        return [_target(entry, name, 0, _full_path(path))], name
    own_name = _as_name(_run_text(root, "trainer", "experiment_name") or root.resolve().name)
    inherited = _inherited(root, entry)
    if shown := [f"{name}={value!r}" for name, value in inherited.items() if value not in ({}, [])]:
        display.say(
            f"{alias or own_name}: {', '.join(shown)}, as in {root / RUN_CONFIG}; temperatures, top_p and n_sampling "
            "are the evaluation's own"
        )
    models: dict[int, str] = {}
    for step in steps:
        with display.recorded():
            number, model = _find_step(root, step, option, entry.base)
            models.setdefault(number, model)
    entry, folder = replace(entry, **inherited), str(root.resolve())
    targets = [_target(entry, alias or own_name, step, model, folder) for step, model in models.items()]
    return targets, _as_name(f"{own_name}_{root.resolve().name}")


def _inherited(root: Path, entry: TargetConfig) -> dict[str, Any]:
    """Return the ``PROMPTING`` options that are set in the run's config but not in ``entry``.

    Raises ``ConfigError`` if the run's config has an invalid value.
    """
    found = {name: _run_option(root, group, name) for name, (group, _) in PROMPTING.items()}
    if _run_option(root, "data", "messages_key"):  # supervised fine-tuning always uses the chat template
        found["template"] = "chat"
    found = {name: value for name, value in found.items() if value is not None and getattr(entry, name) is None}
    try:
        parse_values(TargetConfig, {**asdict(entry), **found})
    except ConfigError as error:
        raise ConfigError(f"{root / RUN_CONFIG}: {error}") from error
    return found


def _target(entry: TargetConfig, run: str, step: int, model: str, folder: str = "") -> Target:
    """Return the model as a target, with prompting options from ``entry`` or default values."""
    values = (default if (value := getattr(entry, name)) is None else value for name, (_, default) in PROMPTING.items())
    template, arguments, length, stop, stop_token_ids = values
    return Target(run, step, model, template, length, arguments, tuple(stop), tuple(stop_token_ids), folder)


def _find_step(root: Path, step: int, field: str, base: str | None) -> tuple[int, str]:
    """Return the number and model path of ``step`` (``LAST``: the newest). Raise ``ConfigError`` if it is missing."""
    if step == 0:
        model = find_model(base or _run_text(root, "model", "path"))
        if not model:
            raise ConfigError(f"{field}.base=null: {root}/config.yaml does not name model.path; name the base model")
        changed = _run_option(root, "model", "override_config")
        if base is None and changed:
            raise ConfigError(
                f"{field}.steps=0: {root} changed its base model by model.override_config={changed}, which evaluations "
                f"do not; leave step 0 out, or name a folder of the changed model as {field}.base"
            )
        require_model(f"{field}.base", model)
        return 0, _full_path(model)
    known = list(checkpoints(root))
    if not known:
        raise ConfigError(f"{field}.steps={step}: {root} has no checkpoint yet; name only 0, the base model")
    number = known[-1] if step == LAST else step
    folder = root / f"global_step_{number}" / MODEL_IN_CHECKPOINT
    if not (folder / "config.json").is_file():
        shards = (folder.parent / "shards").is_dir()
        export = "; `python -m verl.trainer.main_export` creates it" if shards else ""
        steps = ", ".join(map(str, known))
        raise ConfigError(f"{field}.steps={step}: no model in {folder}{export}; the run's steps are {steps}")
    return number, _full_path(str(folder))


def _full_path(model: str) -> str:
    """Make a local path absolute, since workers may run in different directories. Hub ids are unchanged."""
    return str(Path(model).resolve()) if Path(model).exists() else model


def _run_option(root: Path, group: str, option: str) -> Any:
    """Return an option in a run's ``config.yaml``, or None if it is missing or the file cannot be read."""
    try:
        return run_option(read_run_config(root / RUN_CONFIG), group, option)
    except ConfigError:
        return None


def _run_text(root: Path, group: str, option: str) -> str:
    """Like :func:`_run_option`, but return an empty string for values that cannot be a path or a name."""
    value = _run_option(root, group, option)
    return value if isinstance(value, str) and "\0" not in value else ""


def _as_name(text: str) -> str:
    """Replace all characters in ``text`` that are unsuitable for a folder name."""
    return re.sub(r"[^\w.+-]+", "_", text).strip("._-+") or "model"
