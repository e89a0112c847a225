"""Determines whether a command uses options of veRL, options of the paper's release, or only our options.

The default is ``preset=verl`` if a command contains an option that exists only in veRL, and ``preset=paper`` if a
command contains an option that exists only in the release. Our options are allowed in every command.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
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
"""Options that exist only in the release."""

VERL_GROUPS = (
    *("actor_rollout_ref", "custom_reward_function", "distillation"),
    *("global_profiler", "transfer_queue", "ray_kwargs", "ray_init"),
)
"""Option groups that exist only in veRL."""
SHARED_GROUPS = ("algorithm", "critic", "reward", "reward_manager", "reward_model")
"""Option groups that veRL also has. Options in these groups that exist only in veRL identify a veRL command."""

CONFIG_NAMES = ("ppo_trainer", "dapo_trainer", "transfer_queue_ppo_trainer")
"""veRL's configuration files, whose values are in ``preset=verl``."""


def is_release(line: CommandLine) -> bool:
    """Return whether a command contains an option or selects an engine that exists only in the release."""
    return bool(MARKS & line.options.keys()) or line.text(f"{ROLLOUT}.name") == "hidden_vllm"


def is_verl(overrides: Sequence[str]) -> bool:
    """Return whether a command contains an option that exists only in veRL, or requests veRL's defaults."""
    keys = [key for key in map(override_key, overrides) if "." in key]
    shared = [key for key in keys if key.partition(".")[0] in SHARED_GROUPS and not _is_ours(key)]
    only_verls = any(key.partition(".")[0] in VERL_GROUPS for key in keys)
    return "preset=verl" in overrides or only_verls or any(find_verl(key) is not None for key in shared)


def find_verl(key: str) -> tuple[Option, str] | None:
    """Return veRL's table row for ``key`` and the name of the mapping entry, if any, or None if there is no row."""
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
    """Return whether ``key`` is one of our options or an entry of one, such as ``critic.model.override_config.x``."""
    parts = key.split(".")
    groups = [".".join(parts[:length]) for length in range(2, len(parts))]
    return key in SCHEMA or any(g in SCHEMA and g.endswith(("_kwargs", "override_config")) for g in groups)


def refuse_verl_name(key: str) -> None:
    """Raise ``FlagError`` with our equivalent if ``key``, such as ``rollout.mode``, is veRL's option but not ours."""
    option = VERL.get(key) or VERL.get(f"actor_rollout_ref.{key}")
    if option is None or "." not in key or _is_ours(key):
        return
    if option.no_effect:
        raise FlagError(f"{key}: is {option.name} of veRL's, which has no effect here: {plain(option.no_effect)}")
    name = "a name" if option.name == key else option.name
    raise FlagError(f"{key}: is {name} of veRL's; here: {plain(option.describe())}")


@cache
def trl_groups() -> list[dict[str, Any]]:
    """Return TRL's option tables, each with ``heading``, ``text`` and ``rows``, which map names to our equivalents."""
    content: dict[str, Any] = yaml.load(Path(__file__).with_name("trl_options.yaml").read_text(), yaml.BaseLoader)
    return list(content["groups"])


def trl_option(text: str) -> tuple[str, str]:
    """Split a row of TRL's table into our equivalent option (empty if there is not exactly one) and a remark."""
    option, _, remark = text.partition("; ")
    return (option, remark) if option in SCHEMA else ("", text)


def refuse_trl_name(key: str, value: str) -> None:
    """Raise a ``FlagError`` that names our equivalent if ``key`` is one of TRL's options but not one of ours."""
    group, _, leaf = key.rpartition(".")
    name = leaf.replace("-", "_")
    text = next((group["rows"][name] for group in trl_groups() if name in group["rows"]), None)
    # TRL's names are also recognised inside our groups, as in trainer.max_steps.
    is_group = not group or any(option.startswith(f"{group}.") for option in SCHEMA)
    if text is None or key.replace("-", "_") in SCHEMA or key in VERL or not is_group:
        return
    option, remark = trl_option(text)
    if not option:
        raise FlagError(f"{key}: is a name of TRL's; here: {plain(remark)}")
    remark = f" ({plain(remark)})" if remark else ""
    raise FlagError(f"TRL's {name} is {option} here: {option}={value or 'VALUE'}{remark}")


def require_known(override: str) -> None:
    """Raise ``FlagError`` if an override in a veRL command is neither in veRL's table nor one of our options."""
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
"""Hydra's flags for configuration files."""


def with_verl_file(line: CommandLine) -> CommandLine:
    """Prepend the values in the command's configuration file to its overrides, unless the file is one of veRL's.

    Raises ``FlagError`` if the file is missing, unreadable or not based on veRL's configuration.
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
    """Return overrides that set the nested values of a configuration file."""
    if isinstance(values, Mapping):
        return [each for key, value in values.items() for each in _flat(value, f"{prefix}.{key}".lstrip("."))]
    return [f"{prefix}={word(values) if isinstance(values, str) else literal(values)}"]
