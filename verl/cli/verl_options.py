"""veRL's command line at the door: each of its options becomes ours, has no effect for a reason, or is refused by name.

A command with an option of a group that only veRL has is veRL's as a whole: what it leaves out takes veRL's defaults,
``preset=verl``. Our own options may stand beside veRL's.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any

import yaml

from verl.cli import verl_functions
from verl.cli.tables import CommandLine, Option, load_table, plain
from verl.cli.values import FlagError, is_null, literal, nearest, note, override_key, unquoted, word
from verl.cli.verl_functions import ACTOR, ROLLOUT, learns_values, longest
from verl.config.load import option_names
from verl.config.paths import find_path
from verl.config.ppo import PPOConfig

PRESET = "preset=verl"

OPTIONS = load_table("verl_options.yaml", vars(verl_functions), "same")
"""veRL's option -> what becomes of it; ``group.*`` stands for all options of a group that have no entry."""

SCHEMA = frozenset(option_names(PPOConfig, ""))
"""Dotted names of all our options."""

MARKS = ("actor_rollout_ref", "custom_reward_function", "global_profiler", "transfer_queue", "ray_kwargs", "ray_init")
"""Groups that only veRL has."""
SHARED = ("algorithm", "critic", "reward", "reward_manager", "reward_model")
"""Groups of veRL and of ours; an option of veRL's alone in one of them marks a command as veRL's, too."""

CONFIG_NAMES = ("ppo_trainer", "dapo_trainer", "transfer_queue_ppo_trainer")
"""veRL's configuration files whose values are those of ``preset=verl``."""


def lookup(key: str) -> tuple[Option, str] | None:
    """What becomes of veRL's option ``key``, and the part of it that names an entry of a mapping; None if unknown."""
    if key in OPTIONS:
        return OPTIONS[key], ""
    parts = key.split(".")
    for length in range(len(parts) - 1, 0, -1):
        group, rest = ".".join(parts[:length]), ".".join(parts[length:])
        if group in OPTIONS and OPTIONS[group].entries:
            return OPTIONS[group], rest
        if f"{group}.*" in OPTIONS:
            return OPTIONS[f"{group}.*"], ""
    return None


def is_verl(overrides: Sequence[str]) -> bool:
    """Whether a command is veRL's: it has an option of veRL's alone, or asks for veRL's defaults."""
    return any(_marks(override) for override in overrides)


def _marks(override: str) -> bool:
    key = override_key(override)
    group = key.partition(".")[0]
    return (
        override == PRESET
        or ("." in key and group in MARKS)
        or ("." in key and group in SHARED and key not in SCHEMA and not _ours(key) and lookup(key) is not None)
    )


def _ours(key: str) -> bool:
    """Whether an option is an entry of one of our mappings, such as ``critic.model.override_config.x``."""
    parts = key.split(".")
    return any(
        ".".join(parts[:length]) in SCHEMA and ".".join(parts[:length]).endswith(("_kwargs", "override_config"))
        for length in range(2, len(parts))
    )


def translate_verl(line: CommandLine) -> CommandLine:
    """The command with our overrides, and without the name of veRL's configuration; unchanged if it is not veRL's.

    Notes go to stderr, one line for each reason.

    Raises:
        FlagError: an option of veRL's that is refused, or one that neither veRL nor this project has.
    """
    if not is_verl(line.overrides):
        for override in line.overrides:
            _name_ours(override_key(override))
        return line
    line = _with_file(line)
    line = replace(line, overrides=[_resolved(override, line.options) for override in line.overrides])
    translated: list[str] = []
    notes: dict[str, list[str]] = {}
    for override in line.overrides:
        if found := lookup(override_key(override)):
            translated += _translate(override, *found, line)
            if found[0].accepted:
                notes.setdefault(found[0].accepted, []).append(override_key(override))
        else:
            translated.append(_check_ours(override))
    for reason, keys in notes.items():
        note(f"{', '.join(dict.fromkeys(keys))}: no effect: {plain(reason)}")
    translated += _derived(line)
    if not any(override_key(override) == "preset" for override in translated):
        note(f"a command of veRL's: options that it leaves out have veRL's defaults, {PRESET}")
        translated.insert(0, PRESET)
    return replace(line, overrides=translated)


def _name_ours(key: str) -> None:
    """Raise ``FlagError`` for a name of veRL's in a command of ours, with what it is here: ``rollout.mode``."""
    if "." not in key or key in SCHEMA or _ours(key):
        return
    option = OPTIONS.get(key) or OPTIONS.get(f"actor_rollout_ref.{key}")
    if option is None:
        return
    if option.accepted:
        raise FlagError(f"{key}: is {option.name} of veRL's, which has no effect here: {plain(option.accepted)}")
    name = "a name" if option.name == key else option.name
    raise FlagError(f"{key}: is {name} of veRL's; here: {plain(option.describe())}")


def _resolved(text: str, values: Mapping[str, str]) -> str:
    """``text`` with the command's ``values`` in the place of ``${option}``; others are left to Hydra."""
    for _ in range(5):  # a value may name another option
        text = re.sub(r"\$\{(\w+(?:\.\w+)+)\}", lambda name: unquoted(values.get(name[1], name[0])), text)
    return text


def _translate(override: str, option: Option, entry: str, line: CommandLine) -> list[str]:
    key, _, value = override.partition("=")
    if key.startswith("~"):
        raise FlagError(f"{key}: veRL's options cannot be deleted; leave it out")
    if entry:
        return [f"++{option.entries}.{entry}={value}"]
    try:
        return option.translate(value, line)
    except FlagError as error:
        raise FlagError(f"{override_key(override)}={value}: {error}") from None


def _check_ours(override: str) -> str:
    """``override`` if it is an option or a group of ours. Raises ``FlagError`` otherwise."""
    key = override_key(override)
    group = key.partition(".")[0]
    if group == "hydra" or "." not in key or key in SCHEMA or (group not in MARKS and _ours(key)):
        if group in MARKS:
            raise FlagError(f"{key}: set the options of this group one by one, as in {key}.NAME=VALUE")
        return override
    inner = [name for name in OPTIONS if name.startswith(f"{key}.")]
    if inner:
        raise FlagError(f"{key}: set the options of this group one by one, such as {inner[0]}=VALUE")
    known = [name for name in OPTIONS if name.partition(".")[0] == group]
    raise FlagError(
        f"{key}: unknown option{nearest(key, [*known, *SCHEMA])}; docs/from_verl_options.md lists veRL's, "
        "TRAINING_CONFIG.md ours"
    )


def _derived(line: CommandLine) -> list[str]:
    """Options that veRL derives from others."""
    derived = []
    if line.text("reward_model.enable") == "true" and is_null(line.text("reward_model.max_length")):
        derived.append(f"reward_model.max_length={longest(line)}")
    many = line.text(f"{ROLLOUT}.val_kwargs.n", "1") not in ("1", "null")
    if many and line.text(f"{ROLLOUT}.val_kwargs.temperature", "0") in ("0", "0.0"):
        note("rollout.val_kwargs.n=1: with val_kwargs.temperature=0 all responses to a prompt are the same one")
        derived.append("rollout.val_kwargs.n=1")
    if learns_values(line) and line.text(f"{ACTOR}.loss_agg_mode", "token-mean") != "token-mean":
        note("the critic's loss stays the mean over tokens; in veRL critic.loss_agg_mode follows actor.loss_agg_mode")
    return derived


NAME, FOLDER = ("--config-name", "-cn"), ("--config-path", "-cp", "--config-dir", "-cd")
"""Hydra's flags for a configuration file."""


def _with_file(line: CommandLine) -> CommandLine:
    """The command with the values of the configuration file that it names, in front of its own, in place of the name.
    veRL's own files are ``preset=verl``.

    Raises:
        FlagError: a file that is missing, cannot be read, or is based on others than veRL's own.
    """
    kept, named = list[str](), {"name": CONFIG_NAMES[0], "folder": ""}
    rest = list(line.hydra)
    while rest:
        argument = rest.pop(0)
        flag, has_value, value = argument.partition("=")
        if flag in (*NAME, *FOLDER):
            named["name" if flag in NAME else "folder"] = (value if has_value else rest.pop(0)).strip("'\"")
        else:
            kept.append(argument)
    name, folder = named["name"].removesuffix(".yaml"), named["folder"]
    line = replace(line, hydra=kept)
    if name in CONFIG_NAMES and PurePath(folder).name in ("", "config"):
        return line
    where, file = f"--config-name={name}", Path(find_path(folder), f"{name}.yaml")
    if "megatron" in name:
        raise FlagError(f"{where}: Megatron is not supported; leave it out and give its values on the command line")
    if not file.is_file():
        raise FlagError(f"{where}: no file {file}; name its folder in --config-path, or give its values as options")
    try:
        content = yaml.load(file.read_text(encoding="utf-8"), yaml.BaseLoader)
        bases = [base for base in content.pop("defaults", []) if base not in ("_self_", *CONFIG_NAMES)]
        content.pop("hydra", None)
    except (OSError, ValueError, yaml.YAMLError, AttributeError, TypeError) as error:
        raise FlagError(f"{where}: {file} cannot be read: {error!r:.200}") from None
    if bases:
        raise FlagError(f"{where}: {file} is based on {bases[0]!r}; only files based on {CONFIG_NAMES[0]} are read")
    return replace(line, overrides=[*_flat(content), *line.overrides])


def _flat(values: Any, prefix: str = "") -> list[str]:
    """Overrides for what a file says."""
    if isinstance(values, Mapping):
        return [each for key, value in values.items() for each in _flat(value, f"{prefix}.{key}".lstrip("."))]
    return [f"{prefix}={word(values) if isinstance(values, str) else literal(values)}"]
