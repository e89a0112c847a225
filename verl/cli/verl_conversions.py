"""What one of veRL's options can become here, and how its values are converted."""

import ast
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from verl.cli.values import FlagError, literal, quoted
from verl.config.overrides import option_names
from verl.config.ppo import PPOConfig

Kind = Literal["translated", "accepted", "refused"]
Convert = Callable[[str], str]

SCHEMA = frozenset(option_names(PPOConfig, ""))
"""Dotted names of all our options."""


def unquoted(value: str) -> str:
    """The text of a Hydra value without its quotes."""
    text = value.strip()
    return text[1:-1] if len(text) >= 2 and text[0] == text[-1] and text[0] in "'\"" else text


def same(value: str) -> str:
    """The value as typed, except that Python's spellings of true, false and null become Hydra's."""
    words = {"true": "true", "false": "false", "none": "null", "null": "null", "": "null"}
    return words.get(unquoted(value).lower(), value)


def is_null(value: str) -> bool:
    """Whether the value is null in one of its spellings."""
    return same(value) == "null"


def path(value: str) -> str:
    """A path with the home folder for ``~``, which no shell expands behind ``=``."""
    text = unquoted(value)
    return quoted(os.path.expanduser(text)) if text.startswith("~") else same(value)


def elements(value: str) -> list[str]:
    """The entries of a list in Hydra's, Python's or JSON's form, or the only entry."""
    text = unquoted(value)
    try:
        read = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        inner = text[1:-1] if text[:1] in "[(" and text[-1:] in ")]" else text
        read = [unquoted(part) for part in inner.split(",") if part.strip()]
    return [str(entry) for entry in read] if isinstance(read, list | tuple) else [text]


def names(value: str) -> str:
    """A list of words."""
    return literal(elements(value))


def files(value: str) -> str:
    """A list of files, with the home folder for ``~``."""
    return "[]" if is_null(value) else literal([os.path.expanduser(entry) for entry in elements(value)])


def frequency(value: str) -> str:
    """Steps between two events: veRL's 0, negative numbers, null and false are our -1, never."""
    text = same(unquoted(value))
    off = text in ("false", "null") or text == "0" or text.startswith("-")
    return "-1" if off else text


def count_or_zero(value: str) -> str:
    """A number whose 0 is no limit: null and negative numbers become 0."""
    text = same(unquoted(value))
    return "0" if text == "null" or text.startswith("-") else text


def choices(table: Mapping[str, str]) -> Convert:
    """A word of ``table``, or any other as it is; commas separate the values of a sweep."""

    def convert(value: str) -> str:
        return ",".join(table.get(unquoted(part), same(part)) for part in value.split(","))

    return convert


@dataclass(frozen=True)
class Line:
    """The options of a whole command."""

    values: Mapping[str, str]
    """Option without its pluses -> its last value, as typed."""

    def text(self, key: str, default: str = "null") -> str:
        """The value of veRL's or our option ``key``, without quotes."""
        return same(unquoted(self.values.get(key, default)))

    def number(self, key: str, default: int) -> int:
        """The value of an option that is a whole number."""
        text = self.text(key)
        if text == "null":
            return default
        if not text.lstrip("-").isdigit():
            raise FlagError(f"{key}={text}: must be a whole number, from which the other sizes follow")
        return int(text)

    @property
    def workers(self) -> int:
        """Workers of the run: GPUs of all machines."""
        return self.number("trainer.nnodes", 1) * self.number("trainer.n_gpus_per_node", 8)


@dataclass(frozen=True)
class Option:
    """What becomes of one of veRL's options."""

    kind: Kind
    meaning: str
    """What it becomes, or why it has no effect or is refused, in Markdown."""
    translate: Callable[[str, Line], list[str]]
    """Its value, as typed, to our overrides."""
    note: str = ""
    """One line for the user: why the option has no effect."""
    mapping: str = ""
    """Our mapping, whose entries veRL's are."""


def to(*options: str, convert: Convert = same, note: str = "") -> Option:
    """The option is ours under another name; ``note`` says what its values become."""
    for option in options:
        assert option in SCHEMA, option
    named = ", ".join(f"`{option}`" for option in options)
    meaning = f"{named}; {note}" if note else named
    return Option("translated", meaning, lambda value, _: [f"{option}={convert(value)}" for option in options])


def by(meaning: str, translate: Callable[[str, Line], list[str]]) -> Option:
    """The option becomes what ``translate`` makes of it."""
    return Option("translated", meaning, translate)


def accepted(reason: str) -> Option:
    """The option has no effect, whatever its value."""
    return Option("accepted", reason, lambda value, _: [], reason)


def only(values: Sequence[str], reason: str, instead: str = "") -> Option:
    """The option is accepted with ``values``, which have no effect, and refused with others.

    ``reason`` says why there is no other; ``instead`` what to use for it.
    """
    allowed = [*(["null"] if "null" in values else []), *(value for value in values if value != "null")]
    shown = " or ".join(f"`{value}`" for value in allowed)
    advice = f"; {instead}" if instead else ""

    def translate(value: str, line: Line) -> list[str]:
        if {same(part).lower() for part in elements(value) or ["null"]} - {entry.lower() for entry in values}:
            raise FlagError(f"{reason}{advice}".replace("`", ""))
        return []

    return Option("accepted", f"only {shown}: {reason}{advice}", translate)


def refused(reason: str) -> Option:
    """The option is refused, whatever its value."""

    def translate(value: str, line: Line) -> list[str]:
        raise FlagError(reason.replace("`", ""))

    return Option("refused", reason, translate)


def entries(option: str, note: str = "") -> Option:
    """A mapping that is ours under another name; its entries keep their names."""
    meaning = f"the same entry of `{option}`" + (f"; {note}" if note else "")

    def translate(value: str, line: Line) -> list[str]:
        if "attn_implementation" in value and option.endswith("override_config"):
            raise FlagError("attn_implementation is an option of its own; set override_config.attn_implementation")
        return [] if is_null(value) else [f"++{option}={same(value)}"]

    return Option("translated", meaning, translate, mapping=option)
