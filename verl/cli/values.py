"""Values as users type them, written as Hydra reads them."""

import ast
import re
import sys
from collections.abc import Sequence
from difflib import get_close_matches


class FlagError(ValueError):
    """A command line that cannot be translated; the message names the flag and the fix."""


def scalar(text: str) -> str:
    """A number, a boolean in any case, or a word; several of them, separated by commas, are a sweep."""
    return ",".join(_word(part.strip()) for part in text.split(","))


def quoted(text: str) -> str:
    """Quoted text, which Hydra takes literally."""
    # Inside quotes a backslash is literal, except before a quote.
    escaped = re.sub(r"(?<!\\)(\\++)(?='|$)", r"\1\1", text).replace("'", r"\'")
    return f"'{escaped}'"


def listed(text: str) -> str:
    """A list in Python's form, ``['a b', 'c']``, in Hydra's, ``[a b,c]``, or without brackets, ``40,80``."""
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        if text.startswith("["):
            return text
        value = [part.strip() for part in text.split(",")]
    return literal(list(value) if isinstance(value, list | tuple) else [value])


def _word(text: str) -> str:
    if text.lower() in ("true", "false"):
        return text.lower()
    if text.lower() in ("none", "null"):
        return "null"
    return text if re.fullmatch(r"[\w.+/-]+", text) else quoted(text)


def literal(value: object) -> str:
    if isinstance(value, list | tuple):
        return f"[{','.join(literal(element) for element in value)}]"
    return quoted(value) if isinstance(value, str) else scalar(str(value))


def override_key(override: str) -> str:
    """The option or group that a Hydra override sets: ``trainer.test_freq`` of ``++trainer.test_freq=5``."""
    return override.partition("=")[0].lstrip("+~")


def nearest(name: str, known: Sequence[str]) -> str:
    """``; did you mean ...?`` with the name among ``known`` that is most like ``name``; empty if none is."""
    near = get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]}?" if near else ""


def note(text: str) -> None:
    """One line for the user, on stderr."""
    print(f"note: {text}", file=sys.stderr)
