"""Parses the ground truths and tolerances in data files."""

import math
from collections.abc import Iterable, Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

from verl.config.checks import require
from verl.config.errors import ConfigError

MAX_ACCEPTED = 64
"""Maximum number of accepted answers per question."""

MAX_DEPTH = 32
"""Maximum nesting depth of values sent to verifier processes. Records in real datasets have two or three levels."""

TOLERANCES = {"tolerance": Decimal("1e100"), "relative_tolerance": Decimal(1)}
"""Exclusive upper limit of each tolerance in ``extra_info``. At the limit, every answer would be accepted."""

MAX_INTEGER_BITS = 1024
"""Maximum bit length of integers. Longer integers are rejected, because formatting them takes quadratic time."""


def is_missing(truth: Any) -> bool:
    """Return whether the answer is missing: null, blank text, or NaN, which tables use for missing numbers."""
    blank = isinstance(truth, str) and not truth.strip()
    return truth is None or blank or (isinstance(truth, float) and math.isnan(truth))


def any_of(truth: Any) -> list[str]:
    """Return the accepted answers from a string, a number, or a list of them. Raises ``ValueError`` for other types."""
    entries = list(truth) if isinstance(truth, list | tuple) else [truth]
    if not 1 <= len(entries) <= MAX_ACCEPTED:
        raise ValueError(f"has {len(entries)} answers; give 1 to {MAX_ACCEPTED}")
    return [_text(entry) for entry in entries]


def any_of_words(truth: Any) -> list[str]:
    """Return the accepted answers like :func:`any_of`, but convert booleans to the words ``True`` and ``False``."""
    entries = truth if isinstance(truth, list | tuple) else [truth]
    return any_of([str(entry) if isinstance(entry, bool) else entry for entry in entries])


def only_one(truth: Any) -> list[str]:
    """Return the accepted answers like :func:`any_of`, but raise ``ValueError`` if there is more than one."""
    texts = any_of(truth)
    if len(texts) > 1:
        raise ValueError(
            f"has {len(texts)} answers, and a list does not say whether any or all of them are right; write AC for a "
            "question whose right options are A and C together"
        )
    return texts


def _text(value: Any) -> str:
    """Convert a string or number to text, writing whole floats without ``.0`` and other floats without an exponent."""
    if isinstance(value, str) and value.strip():
        return value
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() <= MAX_INTEGER_BITS:
        return str(value)
    if isinstance(value, float) and math.isfinite(value):
        return str(int(value)) if value.is_integer() else format(Decimal(repr(value)), "f")
    raise ValueError(f"{value!r:.200} must be text that is not blank, or a finite number")


def require_shallow(value: Any, field: str) -> None:
    """Raise a ``ConfigError`` that names ``field`` if a value is nested more than ``MAX_DEPTH`` levels deep.

    Pickling a more deeply nested value would overflow the stack.
    """
    level: Iterable[Any] = [value]
    for _ in range(MAX_DEPTH):
        level = [entry for parent in level for entry in _children(parent)]
        if not level:
            return
    raise ConfigError(f"{field} is nested more than {MAX_DEPTH} levels deep; flatten it")


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, list | tuple) else ()


def read_tolerance(extra_info: Mapping[str, Any], name: str) -> Decimal | None:
    """Return the tolerance ``name``, or None if it is missing or invalid (see ``check_tolerances``)."""
    value = extra_info.get(name)
    try:
        tolerance = Decimal("nan") if value is None or isinstance(value, bool) else Decimal(str(value).strip())
    except (InvalidOperation, ValueError):  # ValueError for an integer with thousands of digits.
        return None
    return tolerance if tolerance.is_finite() and 0 <= tolerance < TOLERANCES[name] else None


def check_tolerances(extra_info: Mapping[str, Any]) -> None:
    """Raise a ``ConfigError`` that names the first tolerance outside of [0, limit), if there is one."""
    for name, limit in TOLERANCES.items():
        value = extra_info.get(name)
        valid = value in (None, "") or read_tolerance(extra_info, name) is not None
        require(valid, f"extra_info.{name}", value, f"must be a number from 0 to below {limit}; remove it if unknown")
