"""What a user's reward function returns besides the score, veRL's ``reward_extra_info``: bounded plain values.

Extras are often made of the response (``pred``), so they are as hostile as it is. What leaves a verifier process is a
few plain values of a few thousand characters, whatever the function returned.
"""

import json
import math
import re
import statistics
from collections.abc import Collection, Iterable, Mapping
from typing import Any

MAX_EXTRAS = 32
"""Keys kept of one response; further ones are left out."""

MAX_KEY_CHARS = 64
"""Longer keys are cut."""

MAX_CHARS = 4000
"""Characters kept of all values of one response together, as JSON. A text that exceeds them is cut, any other value is
replaced by the name of its type."""

MAX_CONTAINERS = 256
"""A value of more lists and mappings is replaced by the name of its type."""

MAX_LOGGED_KEYS = 32
"""Keys whose means are logged; of more, those that most responses have."""

_NOT_IN_KEYS = re.compile(r"[^\w.-]+", re.ASCII)


def plain_extras(returned: Mapping[Any, Any], ignored: Collection[str]) -> dict[str, Any]:
    """The entries of ``returned`` except ``ignored``, as JSON values within the limits of this module.

    Characters of a key other than letters, digits, ``_``, ``.`` and ``-`` become ``_``. Of two keys that become equal,
    the first counts. Integers beyond 64 bits become floats, so that they fit a column of a table.
    """
    extras: dict[str, Any] = {}
    left = MAX_CHARS
    for key, value in returned.items():
        name = _NOT_IN_KEYS.sub("_", str(key)[:MAX_KEY_CHARS])
        if key in ignored or name in extras or len(extras) == MAX_EXTRAS:
            continue
        text = json.dumps(value, default=_plain, skipkeys=True)
        if len(text) > left or text.count("[") + text.count("{") > MAX_CONTAINERS:
            text = json.dumps(str.__str__(value)[:left] if isinstance(value, str) else _type_name(value)[:left])
        extras[name] = json.loads(text, parse_int=lambda digits: int(digits) if len(digits) < 19 else float(digits))
        left = max(0, left - len(text))
    return extras


def _plain(value: Any) -> Any:
    """The value of a scalar of numpy or torch; the type's name of anything else that JSON does not have."""
    return value.item() if getattr(value, "ndim", None) == 0 and hasattr(value, "item") else _type_name(value)


def _type_name(value: Any) -> str:
    return f"<{type(value).__name__}>"


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
