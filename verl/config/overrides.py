"""One-line explanations of Hydra overrides that do not fit the schema."""

from collections.abc import Iterator
from dataclasses import is_dataclass
from difflib import get_close_matches
from typing import Any, get_type_hints

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

VERL_NAMES = {"data.val_max_samples": "val_sample_size"}
"""veRL's name of an option -> ours, where the nearest name is that of another option."""


def explain(error: HydraException, schema: type) -> str:
    """The unknown key with the nearest known one, or Hydra's own message in one line."""
    cause = error.__cause__
    key = cause.full_key if isinstance(cause, OmegaConfBaseException) else None
    if not key:
        return " ".join(str(error).split())
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
