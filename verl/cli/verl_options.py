"""veRL's command line at the door: each of its options becomes ours, has no effect for a reason, or is refused by name.

A command with an option of a group that only veRL has is veRL's as a whole: what it leaves out takes veRL's defaults,
``preset=verl``. Our own options may stand beside veRL's.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import PurePath

from verl.cli.values import FlagError, nearest, note, override_key
from verl.cli.verl_conversions import SCHEMA, Line, Option, is_null, refused, unquoted
from verl.cli.verl_earlier import EARLIER_OPTIONS
from verl.cli.verl_learning import ALGORITHM_OPTIONS, CRITIC_OPTIONS, REWARD_OPTIONS
from verl.cli.verl_models import ACTOR
from verl.cli.verl_policy import ACTOR_OPTIONS, MODEL_OPTIONS, REF_OPTIONS
from verl.cli.verl_rollout import ROLLOUT, ROLLOUT_OPTIONS
from verl.cli.verl_run import DATA_OPTIONS, SYSTEM_OPTIONS, TRAINER_OPTIONS

PRESET = "preset=verl"

OPTIONS: dict[str, Option] = {
    **EARLIER_OPTIONS,
    **DATA_OPTIONS,
    **MODEL_OPTIONS,
    **ACTOR_OPTIONS,
    **REF_OPTIONS,
    **ROLLOUT_OPTIONS,
    **ALGORITHM_OPTIONS,
    **CRITIC_OPTIONS,
    **REWARD_OPTIONS,
    **TRAINER_OPTIONS,
    **SYSTEM_OPTIONS,
}
"""veRL's option -> what becomes of it; ``group.*`` stands for all options of a group that have no entry."""

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
    if ".megatron." in f"{key}.":
        return refused("Megatron is not supported; models are sharded by FSDP2, set fsdp_config"), ""
    parts = key.split(".")
    for length in range(len(parts) - 1, 0, -1):
        group, rest = ".".join(parts[:length]), ".".join(parts[length:])
        if group in OPTIONS and OPTIONS[group].mapping:
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


def translate_overrides(overrides: Sequence[str], hydra: Sequence[str] = ()) -> tuple[list[str], list[str]]:
    """Our overrides for those of a command, and the flags of Hydra that stay; both unchanged if it is not veRL's.

    Notes go to stderr, one line for each reason.

    Raises:
        FlagError: an option of veRL's that is refused, or one that neither veRL nor this project has.
    """
    if not is_verl(overrides):
        return list(overrides), list(hydra)
    values = {override_key(override): override.partition("=")[2] for override in overrides}
    overrides = [_resolved(override, values) for override in overrides]
    line = Line({key: _resolved(value, values) for key, value in values.items()})
    translated: list[str] = []
    notes: dict[str, list[str]] = {}
    for override in overrides:
        found = lookup(override_key(override))
        if found is None:
            translated.append(_own(override))
            continue
        option, rest = found
        translated += _translate(override, option, rest, line)
        if option.note:
            notes.setdefault(option.note, []).append(override_key(override))
    for reason, keys in notes.items():
        note(f"{', '.join(dict.fromkeys(keys))}: no effect: {reason.replace('`', '')}")
    translated += _follows(line)
    if not any(override_key(override) == "preset" for override in translated):
        note(f"a command of veRL's: options that it leaves out have veRL's defaults, {PRESET}")
        translated.insert(0, PRESET)
    return translated, _hydra_flags(hydra)


def _resolved(text: str, values: Mapping[str, str]) -> str:
    """``text`` with the command's ``values`` in the place of ``${option}``; others are left to Hydra."""
    for _ in range(5):  # a value may name another option
        text = re.sub(r"\$\{(\w+(?:\.\w+)+)\}", lambda name: unquoted(values.get(name[1], name[0])), text)
    return text


def _translate(override: str, option: Option, rest: str, line: Line) -> list[str]:
    key, _, value = override.partition("=")
    if key.startswith("~"):
        raise FlagError(f"{key}: veRL's options cannot be deleted; leave it out")
    try:
        if rest:
            return [f"++{option.mapping}.{rest}={value}"]
        return option.translate(value, line)
    except FlagError as error:
        raise FlagError(f"{override_key(override)}={value}: {error}") from None


def _own(override: str) -> str:
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
        f"{key}: unknown option{nearest(key, [*known, *SCHEMA])}; docs/from_verl.md lists veRL's, TRAINING_CONFIG.md "
        "ours"
    )


def _follows(line: Line) -> list[str]:
    """Options that veRL derives from others."""
    follows = []
    if line.text("reward_model.enable") == "true" and is_null(line.text("reward_model.max_length")):
        longest = sum(line.number(f"data.max_{part}_length", 512) for part in ("prompt", "response"))
        follows.append(f"reward_model.max_length={longest}")
    if _greedy_validation(line):
        note("rollout.val_kwargs.n=1: with val_kwargs.temperature=0 all responses to a prompt are the same one")
        follows.append("rollout.val_kwargs.n=1")
    aggregation = line.text(f"{ACTOR}.loss_agg_mode", "token-mean")
    if line.text("algorithm.adv_estimator", "gae") == "gae" and aggregation != "token-mean":
        note("the critic's loss stays the mean over tokens; in veRL critic.loss_agg_mode follows actor.loss_agg_mode")
    return follows


def _greedy_validation(line: Line) -> bool:
    """Whether veRL would validate with several greedy responses, which are alike."""
    samples = line.text(f"{ROLLOUT}.val_kwargs.n", line.text(f"{ROLLOUT}.n_val", "1"))
    temperature = line.text(f"{ROLLOUT}.val_kwargs.temperature", line.text(f"{ROLLOUT}.val_temperature", "0"))
    return samples not in ("1", "null") and temperature in ("0", "0.0")


def _hydra_flags(hydra: Sequence[str]) -> list[str]:
    """Hydra's flags without the name of veRL's own configuration file. Raises ``FlagError`` for another's."""
    kept: list[str] = []
    rest = list(hydra)
    while rest:
        flag = rest.pop(0)
        name, has_value, value = flag.partition("=")
        if name not in ("--config-name", "-cn", "--config-path", "-cp", "--config-dir", "-cd"):
            kept.append(flag)
            continue
        value = (value if has_value else rest.pop(0)).strip("'\"")
        if name in ("--config-path", "-cp", "--config-dir", "-cd") and PurePath(value).name != "config":
            raise FlagError(f"{name}={value}: files there are not read; give their values on the command line")
        if name in ("--config-name", "-cn") and value.removesuffix(".yaml") not in CONFIG_NAMES:
            reason = "Megatron is not supported" if "megatron" in value else "is a configuration file of veRL's"
            raise FlagError(f"{name}={value}: {reason}; leave it out and give its values on the command line")
    return kept
