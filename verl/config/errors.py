"""The error for everything that a user can fix by changing an option or a file."""

import unicodedata

_ESCAPED = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Unicode categories of characters that a terminal would obey, or could not write."""


def in_one_line(error: BaseException) -> str:
    """The message of an error of another library in one line, at most 300 characters; its type if it has none."""
    return f"{' '.join(str(error).split()) or type(error).__name__:.300}"


class ConfigError(ValueError):
    """A config that cannot be run; the message names the field, the value and the fix.

    Values come from files and command lines: their control characters and lone surrogates are shown as escapes.
    """

    def __init__(self, message: str) -> None:
        super().__init__("".join(map(_shown, message)))


def _shown(character: str) -> str:
    if character == "\n" or character.isprintable() or unicodedata.category(character) not in _ESCAPED:
        return character
    return character.encode("unicode_escape").decode()
