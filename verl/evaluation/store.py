"""Samples on disk, written as they arrive, so that an interrupted evaluation can resume.

A folder holds the samples of one model on one benchmark at one temperature::

    generation.json    the settings that the samples depend on, and a digest of every prompt
    samples.jsonl      one line per sample

Files of JSON lines are only appended to. A process that is killed while it writes leaves its last line incomplete;
readers drop that line.
"""

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Self, TypeVar, get_args, get_origin, get_type_hints

from verl.config.errors import ConfigError
from verl.utils.files import open_to_write, replace_text

SETTINGS_FILE = "generation.json"
SAMPLES_FILE = "samples.jsonl"

FIX = "name another trainer.default_local_dir, or remove that folder"

SampleKey = tuple[int, int]
"""Problem and sample, both from 0."""

RecordT = TypeVar("RecordT")


def read_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Return the objects in the file, each with its place for messages; an incomplete last line is cut off the file.

    Raises:
        ConfigError: the file cannot be read, or a complete line is not a JSON object.
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
    # Not splitlines(), which also splits at characters that JSON allows inside a text.
    for number, line in enumerate(content[:complete].split(b"\n")[:-1], start=1):
        place = f"{path}, line {number}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if not isinstance(record, dict):
            raise _damaged(place)
        yield place, record


def parse_record(kind: type[RecordT], record: Mapping[str, Any], place: str) -> RecordT:
    """Return the dataclass ``kind`` with the fields of ``record``; those with defaults may be missing.

    Raises ``ConfigError`` for other fields, or other types.
    """
    hints = get_type_hints(kind)
    described: Any = kind  # a dataclass, for which there is no annotation
    optional = {field.name for field in fields(described) if field.default_factory is not MISSING}
    complete = hints.keys() - optional <= record.keys() <= hints.keys()
    if not complete or not all(_fits(value, hints[name]) for name, value in record.items()):
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


def copy_samples(source: Path, folder: Path) -> bool:
    """Copy samples and their settings into ``folder``, unless that is there already; returns whether it was done."""
    if folder.exists() or not (source / SAMPLES_FILE).is_file():
        return False
    unfinished = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}.unfinished")
    unfinished.mkdir(parents=True)
    try:
        for name in (SETTINGS_FILE, SAMPLES_FILE):
            shutil.copyfile(source / name, unfinished / name)
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return True


class AppendFile:
    """A file of JSON lines that records are added to; a context manager."""

    def __init__(self, path: Path) -> None:
        # A response may hold half of a surrogate pair, which strict UTF-8 refuses.
        handle = open_to_write(path, os.O_WRONLY | os.O_APPEND)
        self._file = os.fdopen(handle, "a", encoding="utf-8", errors="surrogatepass")

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


@dataclass(frozen=True)
class StoredSample:
    """One response, as generated."""

    problem: int
    sample: int
    response: str
    num_tokens: int
    truncated: bool
    metrics: dict[str, float]
    """Rank metrics by name; empty if none were measured."""
    token_ids: list[int] = field(default_factory=list)
    """Empty where they are not kept."""
    conversation: list[dict[str, str]] = field(default_factory=list)
    """Who said what, as :func:`verl.rollout.environments.conversations.who_said_what` tells it; empty for one turn."""

    def record(self) -> dict[str, Any]:
        """Return the line of the file."""
        return {
            name: value for name, value in asdict(self).items() if name not in ("token_ids", "conversation") or value
        }


class SampleStore(AppendFile):
    """The samples in one folder. A context manager, because it keeps a file open.

    Args:
        folder: created if missing.
        settings: everything besides the prompts that the samples depend on, as plain values.
        prompts: token ids of each problem's prompt. There may be more or fewer problems than in an earlier evaluation.
        unanswered: problems of which there are no samples.

    Raises:
        ConfigError: the folder holds samples of other settings or prompts, or a damaged line.
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
        """Problems of which there are samples, or will be."""
        folder.mkdir(parents=True, exist_ok=True)
        self._claim(json.loads(json.dumps(settings)), [_digest(ids) for ids in prompts])
        path = folder / SAMPLES_FILE
        stored = [parse_record(StoredSample, record, place) for place, record in read_lines(path)]
        self.samples: dict[SampleKey, StoredSample] = {(sample.problem, sample.sample): sample for sample in stored}
        super().__init__(path)

    def missing(self, n: int) -> list[SampleKey]:
        """Which of the first ``n`` samples of every problem are missing, problem by problem."""
        return [(i, j) for i in self.answered for j in range(n) if (i, j) not in self.samples]

    def append(self, samples: Sequence[StoredSample]) -> None:
        """Add samples. They survive the end of the process from the moment this returns."""
        for sample in samples:
            assert (sample.problem, sample.sample) not in self.samples, sample
            self.samples[sample.problem, sample.sample] = sample
        self.write([sample.record() for sample in samples])

    def _claim(self, settings: dict[str, Any], digests: list[str]) -> None:
        """Compare settings and prompts with those of the folder, or record them in a new one."""
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


def _digest(ids: Sequence[int]) -> str:
    return hashlib.blake2b(",".join(map(str, ids)).encode(), digest_size=4).hexdigest()
