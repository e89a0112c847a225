"""Reads the YAML tables that translate options of other command lines to ours.

Each file contains a list of ``groups``. The prefix ``group`` is prepended to the names of the group's rows, and the
prefix ``ours`` to our options that start with a dot. In all strings, ``$theirs`` stands for ``group`` and ``$ours`` for
``ours``. A row is either the name of our option or a mapping with these keys:

- ``to``: our option, or several, to set to the value; ``as``: its conversion, one of ``CONVERSIONS``
- ``values``: values that are spelled differently here; ``skip``: values that do not set our option
- ``also``: overrides to prepend, unless the value is false or null
- ``unless``: other options of the command, and their values for which this row is ignored
- ``only``: accepted values; the message about other values contains ``because`` and ``instead``
- ``entries``: our mapping option, whose entries have the same names
- ``no_effect`` or ``refused``: the reason why the option has no effect or is rejected
- ``read_with``: the option whose row also reads this option
- ``by``: a function in ``rules.py`` if the meaning depends on other options; ``of``: an option that the function reads
- ``note``: a remark for the documentation page; ``meaning``: the page's full text if the row itself is unclear
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from string import Template
from typing import Any

import yaml

from verl.cli.values import CONVERSIONS, FlagError, elements, override_key, same, unquoted


@dataclass(frozen=True)
class CommandLine:
    """Arguments of ``train.sh``, sorted by kind."""

    flags: dict[str, str]
    """Flags of the release with their values. A flag with an empty value counts as unset."""
    overrides: list[str]
    """Hydra overrides of our options, veRL's options or the release's options."""
    hydra: list[str]
    """Hydra's flags with their values."""
    ignored: list[str] = field(default_factory=list)
    """Names of options that have no effect in VERL."""

    @cached_property
    def options(self) -> dict[str, str]:
        """Last value of each option or group in ``overrides``, as typed."""
        return {override_key(override): override.partition("=")[2] for override in self.overrides}

    def text(self, key: str, default: str = "null") -> str:
        """Return the value of an option without quotes."""
        return same(unquoted(self.options.get(key, default)))

    def number(self, key: str, default: int) -> int:
        """Return the value of an integer option."""
        text = self.text(key)
        if text == "null":
            return default
        if not text.lstrip("-").isdigit():
            raise FlagError(f"{key}={text}: must be a whole number, from which the other sizes follow")
        return int(text)


def plain(markdown: str) -> str:
    """Return the text without Markdown's backticks."""
    return markdown.replace("`", "")


Function = Callable[["Option", str, CommandLine], list[str]]
"""f(option, value as typed, command) -> our overrides; rows refer to such a function with the key ``by``."""


@dataclass(frozen=True)
class Option:
    """A table row, which translates an option or flag of another command line."""

    name: str
    section: str
    """Heading of the documentation table that contains the row."""
    row: int
    """Index in the table. If two rows set the same option, the later row takes precedence."""
    convert: Callable[[str], str]
    to: tuple[str, ...] = ()
    values: Mapping[str, str] = field(default_factory=dict)
    skip: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    unless: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    only: tuple[str, ...] = ()
    because: str = ""
    instead: str = ""
    entries: str = ""
    no_effect: str = ""
    refused: str = ""
    read_with: str = ""
    by: Function | None = None
    of: str = ""
    note: str = ""
    meaning: str = ""

    def translate(self, value: str, line: CommandLine) -> list[str]:
        """Translate a value, as typed by the user, to overrides of our options.

        Raises ``FlagError`` if the option or its value is rejected.
        """
        if self.refused:
            raise FlagError(plain(self.refused))
        if any(line.text(option) in values for option, values in self.unless.items()):
            return []
        words = {same(part).lower() for part in elements(value) or ["null"]}
        # An accepted value such as ${option:default} refers to another option's value.
        references = r"\$\{([\w.]+):(\w+)\}"
        accepted = {re.sub(references, lambda name: line.text(name[1], name[2]), word).lower() for word in self.only}
        if self.only and words - accepted:
            must = "" if self.because else f"must be {' or '.join(self.only)}"
            raise FlagError(plain(_joined(self.because or self.no_effect, self.instead or must)))
        if same(value) in self.skip:
            return []
        return self.by(self, value, line) if self.by else self.assign(value)

    def assign(self, value: str) -> list[str]:
        """Return the overrides that set our options to the value."""
        converted = self.convert(value)
        if self.values:  # commas separate the values of a sweep
            words = ((same(unquoted(part)), self.convert(part)) for part in value.split(","))
            converted = ",".join(self.values.get(word, unchanged) for word, unchanged in words)
        also = () if same(unquoted(value)) in ("false", "null") else self.also
        return [*also, *(f"{option}={converted}" for option in self.to)]

    def describe(self) -> str:
        """Return the row's text for the documentation page, in Markdown."""
        if self.meaning:
            return self.meaning
        if self.refused:
            return f"refused: {self.refused}"
        unless = " or ".join(f"`{option}` is {_either(values)}" for option, values in self.unless.items())
        unless = f"unless {unless}" if unless else ""
        if self.only and not self.to:
            return f"only {_either(self.only)}: {_joined(self.because or self.no_effect, self.instead, unless)}"
        if self.no_effect:
            return f"no effect: {self.no_effect}"
        if self.read_with:
            return f"read with `{self.read_with}`"
        skipped = [value for value in self.skip if value != "null" and not self.entries]
        return _joined(
            f"the same entry of `{self.entries}`" if self.entries else ", ".join(f"`{o.lstrip('+')}`" for o in self.to),
            f"only {_either(self.only)}" if self.only else "",
            ", ".join(f"`{theirs}` is `{ours}`" for theirs, ours in self.values.items()),
            f"{_either(skipped)}: left as it is" if skipped else "",
            unless,
            self.note,
        )


def _either(values: Sequence[str]) -> str:
    return " or ".join(f"`{value}`" for value in values)


def _joined(*parts: str) -> str:
    return "; ".join(filter(None, parts))


def load_table(file: str, functions: Mapping[str, Any], convert: str) -> dict[str, Option]:
    """Return the rows of a table file in this folder, keyed by name.

    Args:
        functions: Functions that a row may refer to with ``by``.
        convert: Default conversion, for rows without ``as``.
    """
    # BaseLoader keeps scalars such as true, null and 1 as text, like user input. The C version is six times faster.
    loader = getattr(yaml, "CBaseLoader", yaml.BaseLoader)
    options: dict[str, Option] = {}
    for group in yaml.load(Path(__file__).with_name(file).read_text(), loader)["groups"]:
        texts = {"theirs": group["group"], "ours": group.get("ours", "")}
        for key, row in group["rows"].items():
            row = _filled({"to": row} if isinstance(row, str) else row, texts)
            if isinstance(row.get("to"), str):
                row["to"] = (row["to"],)
            if "by" in row:
                row["by"] = functions[row["by"]]
            if "entries" in row:
                row |= {"to": (f"++{row['entries']}",), "skip": ("null",)}
            name, conversion = f"{group['group']}.{key}".lstrip("."), CONVERSIONS[row.pop("as", convert)]
            options[name] = Option(name, group["section"], len(options), conversion, **row)
    return options


def _filled(value: Any, texts: Mapping[str, str]) -> Any:
    """Substitute the group's prefixes into an entry of a row."""
    if isinstance(value, Mapping):
        return {key: _filled(entry, texts) for key, entry in value.items()}
    if isinstance(value, list):
        return tuple(_filled(entry, texts) for entry in value)
    ours = f"{texts['ours']}{value}" if value.startswith(".") else value
    return Template(ours).safe_substitute(texts)
