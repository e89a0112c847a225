"""The error for everything that a user can fix by changing an option or a file."""

import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager

HIDDEN = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Unicode categories of characters that a terminal would obey, or could not write."""


def in_one_line(error: BaseException) -> str:
    """Return another library's error in one line of at most 300 characters; its type if it has no message."""
    return f"{' '.join(str(error).split()) or type(error).__name__:.300}"


def visible(text: str) -> str:
    """Return ``text`` with hidden characters other than the newline as escapes such as ``\\x1b``."""
    return "".join(c.encode("unicode_escape").decode() if _is_hidden(c) else c for c in text)


def _is_hidden(character: str) -> bool:
    return not character.isprintable() and character != "\n" and unicodedata.category(character) in HIDDEN


class Mistakes:
    """Collects independent mistakes, to report them together."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    @contextmanager
    def collected(self) -> Iterator[None]:
        """Keep a ``ConfigError`` that is raised within, and continue after it."""
        try:
            yield
        except ConfigError as error:
            self.lines += str(error).splitlines()

    def raise_all(self) -> None:
        """Raise a ``ConfigError`` with a line for each mistake, if there was any.

        The critic's model and others take over options of ``model``; their mistakes are reported for ``model`` alone.
        """
        kept: list[str] = []
        for line in self.lines:
            if not any(line == other or line.endswith(f".{other}") for other in kept):
                kept.append(line)
        if kept:
            raise ConfigError("\n".join(kept))


class ConfigError(ValueError):
    """A config that cannot be run; the message names the field, the value and the fix.

    Values come from files and command lines: their control characters and lone surrogates are shown as escapes.
    """

    def __init__(self, message: str) -> None:
        super().__init__(visible(message))


def error_lines(error: ConfigError) -> str:
    """Return the text for the user: a line for each mistake."""
    return "\n".join(f"error: {line}" for line in str(error).splitlines())
