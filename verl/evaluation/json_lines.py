"""Files of JSON lines to which lines are only appended.

A process that is killed while it writes leaves its last line incomplete; readers drop that line.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, Self, TypeVar, get_args, get_origin, get_type_hints

from verl.config.errors import ConfigError

RecordT = TypeVar("RecordT")


def read_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects in the file, each with its place for messages; an incomplete last line is cut off the file.

    Raises:
        ConfigError: the file cannot be read, or a complete line is not a JSON object.
    """
    if not path.exists():
        return
    try:
        with path.open("r+b") as file:
            content = file.read()
            complete = content.rfind(b"\n") + 1
            if complete < len(content):
                file.truncate(complete)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}; move it away") from error
    # Not splitlines(), which also splits at characters that JSON allows inside a text.
    for number, line in enumerate(content[:complete].split(b"\n")[:-1], start=1):
        place = f"{path}, line {number}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise _damaged(place) from error
        if not isinstance(record, dict):
            raise _damaged(place)
        yield place, record


def parse_record(kind: type[RecordT], record: Mapping[str, Any], place: str) -> RecordT:
    """The dataclass ``kind`` with the fields of ``record``; those that have defaults may be missing. Raises
    ``ConfigError`` if they are others, or of other types."""
    hints = get_type_hints(kind)
    described: Any = kind  # a dataclass, for which there is no annotation
    optional = {field.name for field in fields(described) if field.default_factory is not MISSING}
    if not hints.keys() - optional <= record.keys() <= hints.keys():
        raise _damaged(place)
    if not all(_fits(value, hints[name]) for name, value in record.items()):
        raise _damaged(place)
    return kind(**record)


def _fits(value: Any, hint: Any) -> bool:
    """Whether a JSON value is of the type ``hint``; an integer also is a float."""
    if get_origin(hint) is dict:
        _, item = get_args(hint)
        return isinstance(value, dict) and (item is Any or all(_fits(entry, item) for entry in value.values()))
    if get_origin(hint) is list:
        return isinstance(value, list) and all(_fits(entry, get_args(hint)[0]) for entry in value)
    return type(value) is hint or (hint is float and type(value) is int)


class AppendFile:
    """A file of JSON lines that records are added to; a context manager."""

    def __init__(self, path: Path) -> None:
        # A response may hold half of a surrogate pair, which strict UTF-8 refuses.
        self._file = path.open("a", encoding="utf-8", errors="surrogatepass")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Add records and hand them to the operating system."""
        self._file.write("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))
        self._file.flush()


class RecordFile(AppendFile):
    """Records on disk that follow from settings, which are the first line.

    A file that was made with other settings is emptied.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        settings = json.loads(json.dumps(settings))
        lines = list(read_lines(path))
        current = bool(lines) and lines[0][1] == settings
        self.stored = lines[1:] if current else []
        """The records that were in the file, each with its place for messages."""
        super().__init__(path)
        if not current:
            self._file.truncate(0)
            self.write([settings])


def _damaged(place: str) -> ConfigError:
    return ConfigError(f"{place} is damaged; remove that line and run the same command again")
