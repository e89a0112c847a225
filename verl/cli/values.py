"""Converts the values that users type to Hydra's syntax."""

import ast
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches


class FlagError(ValueError):
    """Raised if a command line cannot be translated. The message names the flag and the fix."""


# Conversions of flag values, which are plain text.


def scalar(text: str) -> str:
    """Convert a number, a boolean in any case, or a word to Hydra's syntax. Comma-separated values form a sweep."""
    return ",".join(word(part.strip()) for part in text.split(","))


def quoted(text: str) -> str:
    """Return the text in quotes, so that Hydra reads it literally."""
    # Inside quotes, a backslash is literal except before a quote.
    escaped = re.sub(r"(?<!\\)(\\++)(?='|$)", r"\1\1", text).replace("'", r"\'")
    return f"'{escaped}'"


def listed(text: str) -> str:
    """Convert a Python list (``['a b', 'c']``), a Hydra list (``[a b,c]``), or a list without brackets (``40,80``)."""
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        if text.startswith("["):
            return text
        value = [part.strip() for part in text.split(",")]
    return literal(list(value) if isinstance(value, list | tuple) else [value])


def literal(value: object) -> str:
    """Convert a Python value to Hydra's syntax."""
    if isinstance(value, list | tuple):
        return f"[{','.join(literal(element) for element in value)}]"
    return quoted(value) if isinstance(value, str) else scalar(str(value))


def word(text: str) -> str:
    """Convert a number, a boolean in any case, or text to Hydra's syntax."""
    if text.lower() in ("true", "false"):
        return text.lower()
    if text.lower() in ("none", "null"):
        return "null"
    return text if re.fullmatch(r"[\w.+/-]+", text) else quoted(text)


# Conversions of override values, which already use Hydra's syntax.


def unquoted(value: str) -> str:
    """Return the text of a value without quotes."""
    text = value.strip()
    return text[1:-1] if len(text) >= 2 and text[0] == text[-1] and text[0] in "'\"" else text


def same(value: str) -> str:
    """Return the value as typed, except that Python's spellings of true, false and null are replaced by Hydra's."""
    words = {"true": "true", "false": "false", "none": "null", "null": "null", "": "null"}
    return words.get(unquoted(value).lower(), value)


def is_null(value: str) -> bool:
    """Return whether the value is null in any spelling."""
    return same(value) == "null"


def path(value: str) -> str:
    """Return a path with ``~`` expanded, because shells do not expand it after ``=``."""
    text = unquoted(value)
    return quoted(os.path.expanduser(text)) if text.startswith("~") else same(value)


def elements(value: str) -> list[str]:
    """Return the entries of a list in the syntax of Hydra, Python or JSON. A single value becomes a list."""
    text = unquoted(value)
    try:
        read = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        inner = text[1:-1] if text[:1] in "[(" and text[-1:] in ")]" else text
        read = [unquoted(part) for part in inner.split(",") if part.strip()]
    return [str(entry) for entry in read] if isinstance(read, list | tuple) else [text]


def files(value: str) -> str:
    """Return a list of files with ``~`` expanded."""
    return "[]" if is_null(value) else literal([os.path.expanduser(entry) for entry in elements(value)])


def frequency(value: str) -> str:
    """Convert an interval in steps. Zero, negative numbers, null and false all mean "never" and become -1."""
    text = same(unquoted(value))
    off = text in ("false", "null") or text == "0" or text.startswith("-")
    return "-1" if off else text


def count_or_zero(value: str) -> str:
    """Convert a limit. Null and negative numbers become 0, which means no limit."""
    text = same(unquoted(value))
    return "0" if text == "null" or text.startswith("-") else text


def one_less(least: int) -> Callable[[str], str]:
    """Return a conversion that subtracts 1 from integers and sweeps of integers, with a minimum of ``least``."""

    def convert(value: str) -> str:
        numbers = unquoted(value).split(",")
        if not all(number.isdigit() for number in numbers):
            raise FlagError("must be a whole number")
        return ",".join(str(max(least, int(number) - 1)) for number in numbers)

    return convert


def whole_batches(value: str) -> str:
    """Return the number of batches, or raise ``FlagError`` if it is not an integer."""
    try:
        number = float(unquoted(value))
    except ValueError:
        raise FlagError("must be a number") from None
    if not number.is_integer():
        raise FlagError(
            "is a share of a batch that may be begun ahead, here whole batches are; set async_training.max_staleness, "
            f"such as {math.ceil(number)}"
        )
    return f"{number:.0f}"


def folder_name(value: str) -> str:
    """Return a valid folder name for an arbitrary name, such as a model's hub id."""
    name = unquoted(value)
    return same(value) if "${" in name else quoted(re.sub(r"[^\w.+-]+", "_", name, flags=re.ASCII).lstrip("._+-"))


CONVERSIONS: dict[str, Callable[[str], str]] = {
    "scalar": scalar,
    "text": quoted,
    "list": lambda value: listed(unquoted(value)),
    "same": same,
    "unquoted": unquoted,
    "path": path,
    "files": files,
    "frequency": frequency,
    "count_or_zero": count_or_zero,
    "one_less": one_less(0),
    "one_update_less": one_less(1),  # 0 would mean no limit
    "whole_batches": whole_batches,
    "folder_name": folder_name,
    "holds_hf_model": lambda value: str("hf_model" in elements(value)).lower(),
    "unescaped": lambda value: re.sub(r"[\\'\"]", "", value),
}
"""Conversions that rows of an option table may refer to with ``as``."""


def override_key(override: str) -> str:
    """Return the option or group that a Hydra override sets: ``trainer.test_freq`` for ``++trainer.test_freq=5``."""
    return override.partition("=")[0].lstrip("+~")


def nearest(name: str, known: Sequence[str]) -> str:
    """Return ``; did you mean ...?`` with the most similar name in ``known``, or an empty string if there is none."""
    near = get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]}?" if near else ""


def note(text: str) -> None:
    """Print one line for the user to stderr."""
    print(f"note: {text}", file=sys.stderr)
