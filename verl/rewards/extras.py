"""What a user's reward function returns besides the score, veRL's ``reward_extra_info``: bounded plain values.

Extras are often made of the response (``pred``), so they are as hostile as it is. What leaves a verifier process is a
few plain values of a few thousand characters, whatever the function returned.
"""

import math
import re
import statistics
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

MAX_EXTRAS = 32
"""Keys kept of one response; further ones are left out."""

MAX_KEY_CHARS = 64
"""Longer keys are cut."""

MAX_CHARS = 4000
"""Characters kept of all texts of one response together; what exceeds them is cut."""

MAX_ENTRIES = 256
"""Values kept of all lists and mappings of one response together."""

MAX_DEPTH = 4
"""Deeper values are replaced by the name of their type."""

MAX_INTEGER = 2**63
"""Larger integers are kept as floats, so that they fit a column of a table."""

MAX_LOGGED_KEYS = 32
"""Keys whose means are logged; of more, those that most responses have."""

_NOT_IN_KEYS = re.compile(r"[^\w.-]+", re.ASCII)


def plain_extras(returned: Mapping[Any, Any], own: Iterable[str]) -> dict[str, Any]:
    """The entries of ``returned`` except ``own``, as JSON values within the limits of this module.

    Characters of a key other than letters, digits, ``_``, ``.`` and ``-`` become ``_``. Of two keys that become equal,
    the first counts.
    """
    budget = _Budget()
    extras: dict[str, Any] = {}
    left_out = set(own)
    for key, value in returned.items():
        if key in left_out:
            continue
        if len(extras) == MAX_EXTRAS:
            break
        name = _NOT_IN_KEYS.sub("_", str(key)[:MAX_KEY_CHARS])
        if name not in extras:
            extras[name] = budget.plain(value)
    return extras


class _Budget:
    """Turns values into JSON values until its limits are spent."""

    def __init__(self) -> None:
        self.chars = MAX_CHARS
        self.entries = MAX_ENTRIES

    def plain(self, value: Any, depth: int = 0) -> Any:
        if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
            value = value.item()  # a scalar of numpy or torch
        if value is None or isinstance(value, bool):
            return value
        # Built-in types only: another process may not be able to load a subclass, such as an enumeration's.
        if isinstance(value, float):
            return float(value)
        if isinstance(value, int):
            return int(value) if abs(value) < MAX_INTEGER else _as_float(value)
        if isinstance(value, str):
            return self._cut(str.__str__(value))
        if depth < MAX_DEPTH and isinstance(value, Mapping):
            pairs = islice(value.items(), self._take(len(value)))
            return {self._cut(str(key)): self.plain(entry, depth + 1) for key, entry in pairs}
        if depth < MAX_DEPTH and isinstance(value, list | tuple):
            return [self.plain(entry, depth + 1) for entry in value[: self._take(len(value))]]
        return self._cut(f"<{type(value).__name__}>")

    def _cut(self, text: str) -> str:
        text = text[: self.chars]
        self.chars -= len(text)
        return text

    def _take(self, number: int) -> int:
        taken = min(number, self.entries)
        self.entries -= taken
        return taken


def _as_float(value: int) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def extra_metrics(extras: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Means of the numbers and bools among the extras of some responses.

    ``reward_extra/<key>/mean`` over the responses that have a finite one, ``reward_extra/<key>/count`` of these, and
    ``reward_extra/<key>/nonfinite`` of NaN and infinity, if there are any.
    """
    values: dict[str, list[float]] = {}
    for extra in extras:
        for key, value in extra.items():
            if isinstance(value, bool | int | float):
                values.setdefault(key, []).append(float(value))
    metrics: dict[str, float] = {}
    for key in sorted(values, key=lambda key: -len(values[key]))[:MAX_LOGGED_KEYS]:
        finite = [value for value in values[key] if math.isfinite(value)]
        if finite:
            # Exact: the sum of finite floats may exceed the largest.
            metrics[f"reward_extra/{key}/mean"] = statistics.mean(finite)
        metrics[f"reward_extra/{key}/count"] = float(len(finite))
        if len(finite) < len(values[key]):
            metrics[f"reward_extra/{key}/nonfinite"] = float(len(values[key]) - len(finite))
    return metrics
