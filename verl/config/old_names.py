"""Translates options that were renamed since earlier releases, and explains options that were removed."""

import re
import sys
from collections.abc import Sequence
from typing import Any

RENAMED = {
    "actor.tis_level": "algorithm.rollout_correction.rollout_is",
    "actor.tis_cap": "algorithm.rollout_correction.rollout_is_threshold",
    "actor.tis_normalize": "algorithm.rollout_correction.rollout_is_batch_normalize",
}
"""Maps each old option name to its new name. The old value ``none`` becomes null."""
REMOVED = {"trainer.log_release_names": "it was removed; docs/metrics.md has the release's name of each metric"}
"""Maps each removed option to an explanation and a replacement."""


def with_new_names(overrides: Sequence[str]) -> list[str]:
    """Return Hydra overrides with new option names, and print a warning for each old one."""
    words = []
    for override in overrides:
        key, equals, value = override.partition("=")
        name = key.lstrip("+~")
        if name in RENAMED:
            print(f"warning: {name}: is called {RENAMED[name]} now; use the new name", file=sys.stderr)
            key, value = key.replace(name, RENAMED[name]), re.sub(r"\bnone\b", "null", value)
        words.append(f"{key}{equals}{value}")
    return words


def rename_options(tree: Any) -> None:
    """Move values from old to new option names in place, even if the config is malformed."""
    for old, new in RENAMED.items():
        places = []
        for name in (old, new):
            *groups, option = name.split(".")
            group = tree
            for part in groups:
                group = group.get(part) if isinstance(group, dict) else None
            places.append((group, option))
        (source, before), (target, after) = places
        if isinstance(source, dict) and isinstance(target, dict) and before in source:
            value = source.pop(before)
            target[after] = None if value == "none" else value
