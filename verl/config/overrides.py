"""One-line explanations of Hydra overrides that do not fit the schema."""

import re
from collections.abc import Iterator
from dataclasses import is_dataclass
from difflib import get_close_matches
from typing import Any, get_type_hints

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

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
    whole = re.search(r"Could not override '([^']+)'", str(error))
    if reason := unsupported(whole[1] if whole else key) or unsupported(key):
        return f"{whole[1] if whole else key}: unknown key; {reason}"
    group, _, name = key.rpartition(".")
    siblings = [known.rpartition(".")[2] for known in option_names(schema, "") if known.rpartition(".")[0] == group]
    prefix = f"{group}." if group else ""
    near = [VERL_NAMES[key]] if key in VERL_NAMES else get_close_matches(name, siblings, n=1)
    fix = f"did you mean {prefix}{near[0]}?" if near else f"known here: {', '.join(siblings)}"
    if not siblings:
        fix = f"a new entry of {group} needs a plus: +{key}=..."
    return f"{key}: unknown key; {fix}"


def option_names(schema: Any, prefix: str) -> Iterator[str]:
    """Dotted names of all options in ``schema``."""
    for name, hint in get_type_hints(schema).items():
        yield f"{prefix}{name}"
        if is_dataclass(hint):
            yield from option_names(hint, f"{prefix}{name}.")
