"""Whose command a command line is: veRL's, the paper's release's, or ours.

A command with an option that only veRL, or only the release, has is theirs as a whole: what it leaves out has their
defaults, ``preset=verl`` or ``preset=paper``. Our own options may stand next to theirs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any

import yaml

from verl.cli.rules import RELEASE, ROLLOUT, VERL
from verl.cli.tables import CommandLine, Option, plain
from verl.cli.values import FlagError, literal, nearest, override_key, word
from verl.config.load import option_names
from verl.config.paths import find_path
from verl.config.ppo import PPOConfig

SCHEMA = frozenset(option_names(PPOConfig, ""))
"""Dotted names of all our options."""

MARKS = frozenset(name for name, option in RELEASE.items() if option.section == "marks")
"""Options that only the release has."""

VERL_GROUPS = (
    *("actor_rollout_ref", "custom_reward_function", "global_profiler", "transfer_queue", "ray_kwargs", "ray_init"),
)
"""Groups that only veRL has."""
SHARED_GROUPS = ("algorithm", "critic", "reward", "reward_manager", "reward_model")
"""Groups of veRL and of ours; an option of veRL's alone in one of them marks a command as veRL's, too."""

CONFIG_NAMES = ("ppo_trainer", "dapo_trainer", "transfer_queue_ppo_trainer")
"""veRL's configuration files with the values of ``preset=verl``."""


def is_release(line: CommandLine) -> bool:
    """Whether a command is the release's: it has an option, or the engine, that only the release has."""
    return bool(MARKS & line.options.keys()) or line.text(f"{ROLLOUT}.name") == "hidden_vllm"


def is_verl(overrides: Sequence[str]) -> bool:
    """Whether a command is veRL's: it has an option that only veRL has, or asks for veRL's defaults."""
    return any(_marks(override) for override in overrides)


def _marks(override: str) -> bool:
    key = override_key(override)
    group = key.partition(".")[0]
    return (
        override == "preset=verl"
        or ("." in key and group in VERL_GROUPS)
        or ("." in key and group in SHARED_GROUPS and not _is_ours(key) and find_verl(key) is not None)
    )


def find_release(key: str) -> tuple[Option, str] | None:
    """As :func:`find_verl`, of the release's option ``key``."""
    return (RELEASE[key], "") if key in RELEASE else None


def find_verl(key: str) -> tuple[Option, str] | None:
    """Return the row of veRL's option ``key``, and the entry of a mapping that ``key`` names; None without a row."""
    if key in VERL:
        return VERL[key], ""
    parts = key.split(".")
    for length in range(len(parts) - 1, 0, -1):
        group, rest = ".".join(parts[:length]), ".".join(parts[length:])
        if group in VERL and VERL[group].entries:
            return VERL[group], rest
        if f"{group}.*" in VERL:
            return VERL[f"{group}.*"], ""
    return None


def _is_ours(key: str) -> bool:
    """Whether ``key`` is one of our options, or an entry of one, such as ``critic.model.override_config.x``."""
    parts = key.split(".")
    groups = [".".join(parts[:length]) for length in range(2, len(parts))]
    return key in SCHEMA or any(g in SCHEMA and g.endswith(("_kwargs", "override_config")) for g in groups)


def refuse_verl_name(key: str) -> None:
    """Raise ``FlagError`` for veRL's name of an option in a command of ours, with what it is here: ``rollout.mode``."""
    option = VERL.get(key) or VERL.get(f"actor_rollout_ref.{key}")
    if option is None or "." not in key or _is_ours(key):
        return
    if option.no_effect:
        raise FlagError(f"{key}: is {option.name} of veRL's, which has no effect here: {plain(option.no_effect)}")
    name = "a name" if option.name == key else option.name
    raise FlagError(f"{key}: is {name} of veRL's; here: {plain(option.describe())}")


def require_known(override: str) -> None:
    """Raise ``FlagError`` for an override in a command of veRL's that is not in its table, and not one of ours."""
    key = override_key(override)
    group = key.partition(".")[0]
    one_by_one = "set the options of this group one by one"
    if group not in VERL_GROUPS and (group == "hydra" or "." not in key or _is_ours(key)):
        return
    inner = [name for name in VERL if name.startswith(f"{key}.")]
    if inner:
        raise FlagError(f"{key}: {one_by_one}, such as {inner[0]}=VALUE")
    known = [name for name in VERL if name.partition(".")[0] == group]
    raise FlagError(
        f"{key}: unknown option{nearest(key, [*known, *SCHEMA])}; docs/from_verl_options.md lists veRL's, "
        "TRAINING_CONFIG.md ours"
    )


NAME, FOLDER = ("--config-name", "-cn"), ("--config-path", "-cp", "--config-dir", "-cd")
"""Hydra's flags for a configuration file."""


def with_verl_file(line: CommandLine) -> CommandLine:
    """Return the command with the values of the file that it names in front of its own; veRL's are ``preset=verl``.

    Raises:
        FlagError: a file that is missing, cannot be read, or is not based on veRL's.
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
    """Return overrides for the values of a file."""
    if isinstance(values, Mapping):
        return [each for key, value in values.items() for each in _flat(value, f"{prefix}.{key}".lstrip("."))]
    return [f"{prefix}={word(values) if isinstance(values, str) else literal(values)}"]
