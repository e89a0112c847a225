"""One-line explanations of Hydra overrides that do not fit the schema."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import is_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_origin, get_type_hints

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from verl.config.errors import ConfigError

VERL_NAMES = {"data.val_max_samples": "val_sample_size"}
"""veRL's name of an option -> ours, where the nearest name is that of another option."""

_ONE_TURN = (
    "is not supported: a response is one turn, sampled to its end before the update. Put earlier turns into the "
    "prompt's messages, or train with veRL or another framework that has agents"
)
NOT_SUPPORTED = {
    "rollout.multi_turn": f"multi-turn rollout with tools {_ONE_TURN}",
    "rollout.agent": f"rollout by agents {_ONE_TURN}",
    "rollout.mode": "asynchronous rollout is not supported: all responses of a step are sampled with its weights (sync "
    "in veRL), in the workers that train; leave it out",
    "data.tool_config_path": f"rollout with tools {_ONE_TURN}",
    "async_training": "asynchronous training is not supported: each step learns from responses of its own weights; "
    "leave it out",
}
"""veRL's options of what is not here -> what is."""

VERL_GROUP = "actor_rollout_ref"
"""veRL's group of what are the groups model, actor, ref and rollout here."""


def unsupported(name: str, value: Any = None) -> str | None:
    """Why the unknown option ``name`` of veRL is not here, if that is known; None otherwise.

    ``value``: of the option; a mapping is a group of options.
    """
    name = name.removeprefix(f"{VERL_GROUP}.")
    for known, reason in NOT_SUPPORTED.items():
        if name == known or name.startswith(f"{known}."):
            return reason
    inner = value if isinstance(value, dict) else {}
    prefix = "" if name == VERL_GROUP else f"{name}."
    for key, entry in inner.items():
        if found := unsupported(f"{prefix}{key}", entry):
            return found
    if name == VERL_GROUP:
        return f"its groups stand alone here: model, actor, ref, rollout; leave out {VERL_GROUP}"
    return None


def explain(error: HydraException, schema: type) -> str:
    """The unknown key with the nearest known one, or Hydra's own message in one line."""
    cause = error.__cause__
    key = cause.full_key if isinstance(cause, OmegaConfBaseException) else None
    if not key:
        return " ".join(str(error).split())
    # Hydra names the first part that is unknown; the whole name is in its message.
    found = re.search(r"Could not override '([^']+)'", str(error))
    whole = found[1] if found and found[1].startswith(key) else key
    if reason := unsupported(whole) or unsupported(key):
        return f"{whole}: unknown key; {reason}"
    known = list(option_names(schema, ""))
    if key in known:
        return f"{key}: must be {_form(schema, key)}"
    group = key.rpartition(".")[0]
    siblings = [name.rpartition(".")[2] for name in known if name.rpartition(".")[0] == group]
    if not siblings:
        return f"{key}: unknown key; a new entry of {group} needs a plus: +{key}=..."
    return f"{key}: unknown key; {nearest_option(schema, key, whole) or 'known here: ' + ', '.join(siblings)}"


def _form(schema: Any, key: str) -> str:
    """What a value of the option looks like."""
    hint = schema
    for part in key.split("."):
        hint = get_type_hints(hint)[part]
    mapping = is_dataclass(hint) or get_origin(hint) is dict
    return "a mapping, {name: value}" if mapping else "a list, [a,b]" if get_origin(hint) is list else "a single value"


def check_group_values(schema: Any, folder: Path, words: Sequence[str]) -> None:
    """Raise ``ConfigError`` for a group that is set to a number, a list or null, of which Hydra has no clear message.

    Args:
        folder: the config files, a folder for each group that can be chosen.
        words: overrides in any spelling, and perhaps other arguments.
    """
    hints = get_type_hints(schema)
    choices = {path.name: sorted(file.stem for file in path.glob("*.yaml")) for path in folder.iterdir()}
    for word in words:
        group, has_value, _ = word.lstrip("+~").partition("=")
        group, name = group.partition("@")[0], group
        files = choices.get(group, [])
        is_group = bool(files) or is_dataclass(hints.get(group))
        if not has_value or not is_group or word.startswith(("-", "~")):
            continue
        try:
            override = OverridesParser.create().parse_override(word)
        except HydraException:
            continue  # Hydra names what it cannot read
        value = None if override.is_sweep_override() else override.value()
        text = word.partition("=")[2]
        fits = isinstance(value, str | dict) or (value is None and (group == "experiment" or not files))
        if override.is_sweep_override() or fits:
            continue
        if value is None or not is_dataclass(hints.get(group)) or name != group:
            raise ConfigError(f"{name}={text}: must be one of {', '.join(files)}")
        options = ", ".join(f"{group}.{option}" for option in get_type_hints(hints[group]))
        raise ConfigError(f"{group}={text}: is a group of options; set one of {options}")


def nearest_option(schema: type, key: str, whole: str = "", above: str = "") -> str | None:
    """Which option of ``schema`` the unknown ``key`` may stand for; None if none is like it.

    One of the same name elsewhere comes before one of a similar name in the same group.

    Args:
        whole: the whole option, if its group ``key`` is what is unknown.
        above: what comes before the names of ``schema``.
    """
    if key in VERL_NAMES:
        return f"did you mean {key.rpartition('.')[0]}.{VERL_NAMES[key]}?"
    known, name = list(option_names(schema, "")), whole or key
    group, _, leaf = key.rpartition(".")
    same = [option for option in known if f".{option}".endswith(f".{name}")]
    same = same or [option for option in known if option.replace(".", "_") == name.replace(".", "_")]
    if not same and name == key:
        same = [option for option in known if option.rpartition(".")[2] == leaf]
    if not same:
        siblings = [option.rpartition(".")[2] for option in known if option.rpartition(".")[0] == group]
        near = get_close_matches(leaf, siblings, n=1)
        if near:
            return f"did you mean {above}{group}.{near[0]}?" if group else f"did you mean {above}{near[0]}?"
        same = [option for option in known if option.rpartition(".")[2] == name.rpartition(".")[2]]
    return f"did you mean {' or '.join(above + option for option in same[:4])}?" if same else None


def option_names(schema: Any, prefix: str) -> Iterator[str]:
    """Dotted names of all options in ``schema``."""
    for name, hint in get_type_hints(schema).items():
        yield f"{prefix}{name}"
        if is_dataclass(hint):
            yield from option_names(hint, f"{prefix}{name}.")
