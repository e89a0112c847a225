"""Defines the error for problems that a user can fix by changing an option or a file."""

import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager

HIDDEN = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Unicode categories of characters that a terminal interprets or cannot display."""


def in_one_line(error: BaseException) -> str:
    """Return an exception's message as one line of at most 300 characters, or its type if the message is empty."""
    return f"{' '.join(str(error).split()) or type(error).__name__:.300}"


def visible(text: str) -> str:
    """Return ``text`` with non-printing characters other than newlines replaced by escapes such as ``\\x1b``."""
    hidden = {c for c in text if not c.isprintable() and c != "\n" and unicodedata.category(c) in HIDDEN}
    return "".join(c.encode("unicode_escape").decode() if c in hidden else c for c in text)


class Mistakes:
    """Collects independent errors, so that they can be reported together."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    @contextmanager
    def collected(self) -> Iterator[None]:
        """Catch and collect a ``ConfigError`` raised in the block."""
        try:
            yield
        except ConfigError as error:
            self.lines += str(error).splitlines()

    def raise_all(self) -> None:
        """Raise a ``ConfigError`` with one line per collected mistake, if there are any.

        Mistakes in options that other models inherit from ``model`` are reported only once, for ``model``.
        """
        kept: list[str] = []
        for line in self.lines:
            if not any(line == other or line.endswith(f".{other}") for other in kept):
                kept.append(line)
        if kept:
            raise ConfigError("\n".join(kept))


class ConfigError(ValueError):
    """Error for an invalid configuration. The message contains the field, its value and a suggested fix.

    Control characters and lone surrogates, which may come from files and command lines, are escaped.
    """

    def __init__(self, message: str) -> None:
        super().__init__(visible(message))


def error_lines(error: ConfigError) -> str:
    """Return the message for the user, with one line per mistake."""
    return "\n".join(f"error: {line}" for line in str(error).splitlines())
