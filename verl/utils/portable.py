"""Values as every reader takes them: no lone surrogates, no NaN and no infinity, nothing that steers a terminal."""

import math
import unicodedata
from collections.abc import Mapping
from typing import Any

from verl.config.errors import HIDDEN


def valid_unicode(text: str) -> str:
    """``text`` with lone surrogates replaced by U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def finite_or_null(value: Any) -> Any:
    """``value`` with every float that is not finite replaced by None, so that it is valid JSON."""
    # Numbers and texts first: pages have millions of them, and to ask for a mapping takes long.
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
    """``text`` on one line, without characters that a terminal or a file cannot represent."""
    return "".join(" " if unicodedata.category(c) in HIDDEN else c for c in text)
