"""Values as every reader takes them: no lone surrogates, no NaN and no infinity, nothing that steers a terminal."""

import math
import unicodedata
from collections.abc import Mapping
from typing import Any


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
    return "".join(" " if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp") else c for c in text)


def visible(text: str) -> str:
    """``text`` with control, format and separator characters other than the newline as escapes such as ``\\x1b``."""
    return "".join(character if character == "\n" else _escaped(character) for character in text)


def _escaped(character: str) -> str:
    hidden = unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp")
    return character.encode("unicode_escape").decode("ascii") if hidden else character
