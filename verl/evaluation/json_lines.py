"""Files of JSON lines to which lines are only appended.

A process that is killed while it writes leaves its last line incomplete; readers drop that line.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, TypeVar

from verl.config.errors import ConfigError

RecordT = TypeVar("RecordT")


def read_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects in the file, each with its place for messages; an incomplete last line is cut off the file.

    Raises:
        ConfigError: a complete line is not a JSON object.
    """
    if not path.exists():
        return
    with path.open("r+b") as file:
        content = file.read()
        complete = content.rfind(b"\n") + 1
        if complete < len(content):
            file.truncate(complete)
    # Not splitlines(), which also splits at characters that JSON allows inside a text.
    for number, line in enumerate(content[:complete].split(b"\n")[:-1], start=1):
        place = f"{path}, line {number}"
        try:
            record = json.loads(line)
        except ValueError as error:
            raise _damaged(place) from error
        if not isinstance(record, dict):
            raise _damaged(place)
        yield place, record


def parse_record(kind: type[RecordT], record: Mapping[str, Any], place: str) -> RecordT:
    """The dataclass ``kind`` with the fields of ``record``. Raises ``ConfigError`` if they are other fields."""
    try:
        return kind(**record)
    except TypeError as error:
        raise _damaged(place) from error


def open_to_append(path: Path) -> IO[str]:
    """Open a text file for :func:`append_lines`."""
    # A response may hold half of a surrogate pair, which strict UTF-8 refuses.
    return path.open("a", encoding="utf-8", errors="surrogatepass")


def append_lines(file: IO[str], records: Sequence[Mapping[str, Any]]) -> None:
    """Write records as JSON lines and hand them to the operating system."""
    file.write("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))
    file.flush()


def _damaged(place: str) -> ConfigError:
    return ConfigError(f"{place} is damaged; remove that line and run the same command again")
