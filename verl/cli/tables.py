"""Tables of options in YAML: what each option of another command line becomes here, and how rows are read.

A file has a list of ``groups``. Names in a group's ``rows`` follow the name of the ``group``; our options that start
with a dot follow ``ours``; in all texts ``$theirs`` is the ``group``, and ``$ours`` and ``$above`` are what it sets. A
row is the name of our option, or a mapping of

- ``to``: our option, or several, which get the value; ``as``: how it is converted, one of ``CONVERSIONS``
- ``values``: words that have another spelling here; ``skip``: values that leave ours as it is
- ``unless``: an option of the command that comes first
- ``only``: the values that are accepted, with ``because`` and ``instead`` for the message about others
- ``entries``: our mapping, whose entries have the same names
- ``accepted`` or ``refused``: why it has no effect, or is refused
- ``read_with``: the option whose row reads this one
- ``by``: a function, where the meaning depends on other options; ``of``: one that it reads
- ``note``: a remark for the page; ``meaning``: all that the page says about the row, where that is not clear from it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from string import Template
from typing import Any

import yaml

from verl.cli.values import CONVERSIONS, FlagError, elements, is_null, override_key, same, unquoted


@dataclass(frozen=True)
class CommandLine:
    """The arguments of ``train.sh``, sorted."""

    flags: dict[str, str]
    """The release's flags with their values; a flag with an empty value counts as not given."""
    overrides: list[str]
    """Hydra overrides, with options of ours or of veRL's."""
    hydra: list[str]
    """Hydra's own flags, with their values."""

    @cached_property
    def options(self) -> dict[str, str]:
        """What the overrides set: an option such as ``trainer.test_freq``, or a group, with its last value as typed."""
        return {override_key(override): override.partition("=")[2] for override in self.overrides}

    def text(self, key: str, default: str = "null") -> str:
        """The value of an option, without quotes."""
        return same(unquoted(self.options.get(key, default)))

    def number(self, key: str, default: int) -> int:
        """The value of an option that is a whole number."""
        text = self.text(key)
        if text == "null":
            return default
        if not text.lstrip("-").isdigit():
            raise FlagError(f"{key}={text}: must be a whole number, from which the other sizes follow")
        return int(text)


def plain(markdown: str) -> str:
    """Text without the marks of code."""
    return markdown.replace("`", "")


Function = Callable[["Option", str, CommandLine], list[str]]
"""What ``by`` names: the overrides for an option, its value as typed, and the whole command."""


@dataclass(frozen=True)
class Option:
    """One row: an option or flag of another command line, and what becomes of it here."""

    name: str
    section: str
    """Heading of the page's table that it is in."""
    convert: Callable[[str], str]
    to: tuple[str, ...] = ()
    values: Mapping[str, str] = field(default_factory=dict)
    skip: tuple[str, ...] = ()
    unless: str = ""
    only: tuple[str, ...] = ()
    because: str = ""
    instead: str = ""
    entries: str = ""
    accepted: str = ""
    refused: str = ""
    read_with: str = ""
    by: Function | None = None
    of: str = ""
    note: str = ""
    meaning: str = ""

    def translate(self, value: str, line: CommandLine) -> list[str]:
        """Our overrides for its value, as typed.

        Raises:
            FlagError: the option, or this value of it, is refused.
        """
        if self.refused:
            raise FlagError(plain(self.refused))
        words = {same(part).lower() for part in elements(value) or ["null"]}
        if self.only and words - {word.lower() for word in self.only}:
            must = "" if self.because else f"must be {' or '.join(self.only)}"
            raise FlagError(plain(_joined(self.because or self.accepted, self.instead or must)))
        if same(value) in self.skip or not is_null(line.text(self.unless)):
            return []
        return self.by(self, value, line) if self.by else self.assign(value)

    def assign(self, value: str) -> list[str]:
        """The overrides that set our options to the value."""
        converted = self.convert(value)
        if self.values:  # commas separate the values of a sweep
            words = ((same(unquoted(part)), self.convert(part)) for part in value.split(","))
            converted = ",".join(self.values.get(word, unchanged) for word, unchanged in words)
        return [f"{option}={converted}" for option in self.to]

    def describe(self) -> str:
        """What the page says about it, in Markdown."""
        if self.meaning:
            return self.meaning
        if self.refused:
            return f"refused: {self.refused}"
        if self.only and not self.to:
            return f"only {_either(self.only)}: {_joined(self.because or self.accepted, self.instead)}"
        if self.accepted:
            return f"no effect: {self.accepted}"
        if self.read_with:
            return f"read with `{self.read_with}`"
        if self.of and not self.to:
            return f"only the value of `{self.of}`, which sets it"
        skipped = [value for value in self.skip if value != "null" and not self.entries]
        return _joined(
            f"the same entry of `{self.entries}`" if self.entries else ", ".join(f"`{o.lstrip('+')}`" for o in self.to),
            f"only {_either(self.only)}" if self.only else "",
            ", ".join(f"`{theirs}` is `{ours}`" for theirs, ours in self.values.items()),
            f"{_either(skipped)}: left as it is" if skipped else "",
            f"unless `{self.unless}` is set" if self.unless else "",
            self.note,
        )


def _either(values: Sequence[str]) -> str:
    return " or ".join(f"`{value}`" for value in values)


def _joined(*parts: str) -> str:
    return "; ".join(filter(None, parts))


def load_table(file: str, functions: Mapping[str, Any], convert: str) -> dict[str, Option]:
    """The rows of a file beside this module by name.

    ``functions``: where ``by`` finds its own; ``convert``: the conversion of rows without ``as``.
    """
    # BaseLoader keeps every scalar as text: true, null and 1 are values as users type them. In C it takes a sixth.
    loader = getattr(yaml, "CBaseLoader", yaml.BaseLoader)
    groups = yaml.load(Path(__file__).with_name(file).read_text(), loader)["groups"]
    options = {}
    for group in groups:
        texts = {"theirs": group["group"], "ours": group.get("ours", ""), "above": group.get("above", "")}
        for key, row in group["rows"].items():
            row = {"to": row} if isinstance(row, str) else row
            name = f"{group['group']}.{key}".lstrip(".")
            options[name] = _read_row(name, group["section"], _filled(row, texts), functions, convert)
    return options


def _filled(value: Any, texts: Mapping[str, str]) -> Any:
    """A part of a row with the group's names in it."""
    if isinstance(value, Mapping):
        return {key: _filled(entry, texts) for key, entry in value.items()}
    if isinstance(value, list):
        return tuple(_filled(entry, texts) for entry in value)
    ours = f"{texts['ours']}{value}" if value.startswith(".") else value
    return Template(ours).safe_substitute(texts)


def _read_row(name: str, section: str, row: dict[str, Any], functions: Mapping[str, Any], convert: str) -> Option:
    row |= {"convert": CONVERSIONS[row.pop("as", convert)]}
    if "by" in row:
        row["by"] = functions[row["by"]]
    if "entries" in row:
        row |= {"to": f"++{row['entries']}", "skip": ("null",)}
    if isinstance(row.get("to"), str):
        row["to"] = (row["to"],)
    return Option(name, section, **row)
