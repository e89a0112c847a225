"""Makes values portable by replacing lone surrogates, NaN, infinity and control characters."""

import math
import unicodedata
from collections.abc import Mapping
from typing import Any

from verl.config.errors import HIDDEN


def valid_unicode(text: str) -> str:
    """Return ``text`` with lone surrogates replaced by U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def finite_or_null(value: Any) -> Any:
    """Replace nonfinite floats in ``value`` with None, so that it can be written as valid JSON."""
    # Test for numbers and strings first, because reports contain millions of them and the mapping check is slow.
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, list | tuple):
        return [finite_or_null(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): finite_or_null(item) for key, item in value.items()}
    return value


def printable(text: str) -> str:
    """Return ``text`` on one line. Characters that a terminal or a file cannot represent become spaces."""
    return "".join(" " if unicodedata.category(c) in HIDDEN else c for c in text)
