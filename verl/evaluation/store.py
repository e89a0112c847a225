"""On-disk sample store, written incrementally so that an interrupted evaluation can resume.

A folder contains the samples of one model on one benchmark at one temperature::

    generation.json    the settings that the samples depend on, and a digest of every prompt
    samples.jsonl      one line per sample

JSON Lines files are append-only. If a process is killed during a write, the last line is incomplete and is dropped by
readers.
"""

import hashlib
import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, Generic, Self, TypeVar, get_args, get_origin, get_type_hints

from verl.config.errors import ConfigError
from verl.utils.files import open_to_write, replace_text

SETTINGS_FILE = "generation.json"
SAMPLES_FILE = "samples.jsonl"

FIX = "name another trainer.default_local_dir, or remove that folder"

SampleKey = tuple[int, int]
"""Problem index and sample index, both 0-based."""

RecordT = TypeVar("RecordT")


def digest(content: bytes, size: int = 8) -> str:
    """Return a digest of ``content`` with ``size`` bytes as a hexadecimal string."""
    return hashlib.blake2b(content, digest_size=size).hexdigest()


def read_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each object in the file with its location for error messages, after removing an incomplete last line.

    Raises ``ConfigError`` if the file cannot be read, or a complete line is not a JSON object.
    """
    if not os.path.lexists(path):
        return
    try:
        with os.fdopen(open_to_write(path, os.O_RDWR), "r+b") as file:
            content = file.read()
            complete = content.rfind(b"\n") + 1
            if complete < len(content):
                file.truncate(complete)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}; move it away") from error
    # splitlines() would also split at characters that JSON allows inside a string.
    for number, line in enumerate(content[:complete].split(b"\n")[:-1], start=1):
        place = f"{path}, line {number}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if not isinstance(record, dict):
            raise _damaged(place)
        yield place, record


def _damaged(place: str) -> ConfigError:
    return ConfigError(f"{place} is damaged; remove that line and run the same command again")


@cache
def _field_types(kind: Any) -> tuple[dict[str, Any], set[str]]:
    """Return the field types of a dataclass and the names of its optional fields."""
    return get_type_hints(kind), {field.name for field in fields(kind) if field.default_factory is not MISSING}


def _read(value: Any, kind: Any) -> Any:
    """Convert a JSON value to a dataclass, list, dict or plain type. Integers are accepted as floats.

    Raises ``TypeError`` if the value does not have the type ``kind``.
    """
    if is_dataclass(kind) and isinstance(value, dict):
        made: Any = kind  # a dataclass type, which annotations cannot express
        types, optional = _field_types(made)
        if types.keys() - optional <= value.keys() <= types.keys():
            return made(**{name: _read(entry, types[name]) for name, entry in value.items()})
    elif get_origin(kind) is dict and isinstance(value, dict):
        return {name: _read(entry, get_args(kind)[1]) for name, entry in value.items()}
    elif get_origin(kind) is list and isinstance(value, list):
        return [_read(entry, get_args(kind)[0]) for entry in value]
    elif kind is Any or type(value) is kind or (kind is float and type(value) is int):
        return value
    raise TypeError(f"{value!r:.80} is not {kind}")


class RecordFile(Generic[RecordT]):
    """Append-only JSON Lines file of dataclass records. Use the file as a context manager.

    Raises ``ConfigError`` if a line is damaged.

    Args:
        path: File path. The file is created if missing.
        kind: Dataclass of the records. Fields with a default factory are optional and not written if empty.
        settings: Settings that the records depend on, stored in the first line, or None to omit this line. A file with
            different settings is emptied.
    """

    def __init__(self, path: Path, kind: type[RecordT], settings: Mapping[str, Any] | None = None) -> None:
        lines = list(read_lines(path))
        head = [] if settings is None else [json.loads(json.dumps(settings))]
        current = [record for _, record in lines[: len(head)]] == head
        self._kind: Any = kind
        self.records: list[RecordT] = []
        """Records in the file at the time it was opened."""
        for place, record in lines[len(head) :] if current else ():
            try:
                self.records.append(_read(record, kind))
            except TypeError as error:
                raise _damaged(place) from error
        # A response may contain a lone surrogate, which strict UTF-8 rejects.
        handle = open_to_write(path, os.O_WRONLY | os.O_APPEND)
        self._file = os.fdopen(handle, "a", encoding="utf-8", errors="surrogatepass")
        if not current:
            self._file.truncate(0)
            self._write_lines(head)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, records: Sequence[RecordT]) -> None:
        """Append records and flush the file to the operating system."""
        lines: list[dict[str, Any]] = [asdict(record) for record in records]  # type: ignore[call-overload]
        _, optional = _field_types(self._kind)
        self._write_lines([{k: v for k, v in line.items() if v or k not in optional} for line in lines])

    def _write_lines(self, lines: Sequence[Mapping[str, Any]]) -> None:
        self._file.write("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
        self._file.flush()


@dataclass(frozen=True)
class StoredSample:
    """One generated response."""

    problem: int
    sample: int
    response: str
    num_tokens: int
    truncated: bool
    metrics: dict[str, float]
    """Rank metrics keyed by name, or empty if none were measured."""
    token_ids: list[int] = field(default_factory=list)
    """Token ids of the response, or empty if they are not stored."""
    conversation: list[dict[str, str]] = field(default_factory=list)
    """Parts of the conversation (see :func:`verl.rollout.environments.conversations.conversation_parts`), or empty for
    a single turn."""
    environment: dict[str, float] = field(default_factory=dict)
    """Sum of the environment's rewards, number of policy turns, and other counts (see
    :data:`verl.rollout.environments.pool.COUNTS`), or empty for a single turn."""


class SampleStore(RecordFile[StoredSample]):
    """Store of the samples in one folder.

    Raises ``ConfigError`` if the folder contains samples for other settings or prompts, or a damaged line.

    Args:
        folder: Sample folder, which is created if missing.
        settings: Everything that the samples depend on except the prompts, as plain values.
        prompts: Prompt token ids of each problem. The number of problems may differ from earlier evaluations.
        unanswered: Indices of problems that are never sampled.
    """

    def __init__(
        self,
        folder: Path,
        settings: Mapping[str, Any],
        prompts: Sequence[Sequence[int]],
        unanswered: Collection[int] = (),
    ) -> None:
        self.folder = folder
        self.answered = [i for i in range(len(prompts)) if i not in unanswered]
        """Indices of the problems that are sampled."""
        folder.mkdir(parents=True, exist_ok=True)
        digests = [digest(",".join(map(str, ids)).encode(), size=4) for ids in prompts]
        self._claim(json.loads(json.dumps(settings)), digests)
        super().__init__(folder / SAMPLES_FILE, StoredSample)
        self.samples: dict[SampleKey, StoredSample] = {(one.problem, one.sample): one for one in self.records}

    def missing(self, n: int) -> list[SampleKey]:
        """Return the keys of the missing samples among the first ``n`` of every problem, in problem order."""
        return [(i, j) for i in self.answered for j in range(n) if (i, j) not in self.samples]

    def append(self, samples: Sequence[StoredSample]) -> None:
        """Append samples. Once this method returns, the samples survive a crash of the process."""
        for sample in samples:
            assert (sample.problem, sample.sample) not in self.samples, sample
            self.samples[sample.problem, sample.sample] = sample
        self.write(samples)

    def _claim(self, settings: dict[str, Any], digests: list[str]) -> None:
        """Check settings and prompts against those recorded in the folder, or record them if the folder is new."""
        path = self.folder / SETTINGS_FILE
        if path.is_file():
            try:
                record = json.loads(path.read_text())
                old_settings, old_digests = record["settings"], record["prompts"]
            except (OSError, ValueError, KeyError, TypeError, RecursionError):
                old_settings = old_digests = None
            if not isinstance(old_settings, dict) or not isinstance(old_digests, list):
                raise ConfigError(f"{path} is damaged; {FIX}")
            names = [n for n in {**old_settings, **settings} if old_settings.get(n) != settings.get(n)]
            if names:
                changes = ", ".join(f"{n}={old_settings.get(n)!r}, now {settings.get(n)!r}" for n in names)
                raise ConfigError(f"{self.folder}: holds samples made with {changes}; {FIX}")
            differing = [i for i, (a, b) in enumerate(zip(old_digests, digests, strict=False)) if a != b]
            if differing:
                raise ConfigError(
                    f"{self.folder}: holds samples for other prompts: {len(differing)} of {len(digests)} differ, the "
                    f"first is problem {differing[0]}; {FIX}"
                )
            if len(digests) <= len(old_digests):
                return
        elif (self.folder / SAMPLES_FILE).exists():
            raise ConfigError(f"{self.folder}: holds {SAMPLES_FILE} without {SETTINGS_FILE}; {FIX}")
        replace_text(path, json.dumps({"settings": settings, "prompts": digests}, indent=1) + "\n")
