"""Samples on disk, written as they come, so that an evaluation that was stopped goes on where it was.

A folder holds the samples of one model on one benchmark at one temperature::

    generation.json    the settings that the samples depend on, and a digest of every prompt
    samples.jsonl      one line per sample

Lines are only ever appended. A process that was killed leaves at most its last line torn; that line is dropped.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from verl.config.errors import ConfigError
from verl.evaluation.results import write_text

SETTINGS_FILE = "generation.json"
SAMPLES_FILE = "samples.jsonl"

WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".gguf"}
DIGESTED_CONFIGS = {"config.json", "generation_config.json"}
"""The second names further end-of-sequence tokens, which vLLM obeys."""

DIGESTED_PIECES = 64
DIGESTED_BYTES = 1 << 16
"""Pieces of a weight file that its digest covers, evenly spread, and their size. Not its ends alone: a short training
may leave the rare tokens' embeddings and, in bfloat16, the norms there as they were."""

MEND = "name another trainer.default_local_dir, or remove that folder"

SampleKey = tuple[int, int]
"""Problem and sample, both from 0."""


@dataclass(frozen=True)
class StoredSample:
    """One response, as generated."""

    problem: int
    sample: int
    response: str
    num_tokens: int
    truncated: bool
    metrics: dict[str, float]
    """Rank metrics; empty where none were measured."""


class SampleStore:
    """The samples in one folder; a context manager, as it holds a file open.

    Args:
        folder: made if it is not there.
        settings: what the samples depend on besides the prompts, plain values.
        prompts: token ids of each problem's prompt. More problems than at an earlier time are welcome.

    Raises:
        ConfigError: the folder holds samples made with other settings or prompts, or a line that is damaged.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any], prompts: Sequence[Sequence[int]]) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._claim(json.loads(json.dumps(settings)), [_digest_tokens(ids) for ids in prompts])
        path = folder / SAMPLES_FILE
        self.samples: dict[SampleKey, StoredSample] = {}
        for number, record in read_lines(path):
            sample = _sample_of(record, f"{path}, line {number}")
            self.samples[sample.problem, sample.sample] = sample
        self._file = open_to_append(path)

    def __enter__(self) -> "SampleStore":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def missing(self, num_problems: int, n: int) -> list[SampleKey]:
        """Which of the first ``n`` samples of the first problems are not there, problem by problem."""
        return [(i, j) for i in range(num_problems) for j in range(n) if (i, j) not in self.samples]

    def append(self, samples: Sequence[StoredSample]) -> None:
        """Add samples. They are in the file when this returns, whatever then happens to the process."""
        for sample in samples:
            assert (sample.problem, sample.sample) not in self.samples, sample
            self.samples[sample.problem, sample.sample] = sample
        append_lines(self._file, [asdict(sample) for sample in samples])

    def _claim(self, settings: dict[str, Any], digests: list[str]) -> None:
        """Compare with what the folder was made with, or note it down in a new one."""
        path = self.folder / SETTINGS_FILE
        if path.is_file():
            try:
                found = json.loads(path.read_text())
                old_settings, old_digests = found["settings"], found["prompts"]
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(f"{path}: is damaged; {MEND}") from error
            _require_same(self.folder, old_settings, settings)
            _require_same_prompts(self.folder, old_digests, digests)
            if len(digests) <= len(old_digests):
                return
        elif (self.folder / SAMPLES_FILE).exists():
            raise ConfigError(f"{self.folder}: holds {SAMPLES_FILE} without {SETTINGS_FILE}; {MEND}")
        write_text(path, json.dumps({"settings": settings, "prompts": digests}, indent=1) + "\n")


def model_digest(path: str) -> str:
    """What tells the weights in a local folder from others, wherever it stands; a hub id stands for itself.

    Raises:
        ConfigError: the folder is there no more, or goes while it is read.
    """
    folder = Path(path)
    if not folder.is_absolute() and not folder.is_dir():
        return path
    digest = hashlib.blake2b(digest_size=8)
    try:
        for file in sorted(folder.iterdir()):
            if file.suffix in WEIGHT_SUFFIXES or file.name in DIGESTED_CONFIGS:
                _add_file(digest, file)
    except OSError as error:
        raise ConfigError(f"{path}: the model cannot be read: {error.strerror}; was it removed?") from error
    return digest.hexdigest()


def _add_file(digest: "hashlib.blake2b", file: Path) -> None:
    size = file.stat().st_size
    digest.update(f"{file.name}/{size}/".encode())
    with file.open("rb") as content:
        if size <= DIGESTED_PIECES * DIGESTED_BYTES:
            digest.update(content.read())
            return
        for piece in range(DIGESTED_PIECES):
            content.seek((size - DIGESTED_BYTES) * piece // (DIGESTED_PIECES - 1))
            digest.update(content.read(DIGESTED_BYTES))


def read_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a file of JSON lines with their line numbers; a last line that has no end is cut off.

    Raises:
        ConfigError: a line that has its end and is no JSON object.
    """
    if not path.exists():
        return
    with path.open("r+b") as file:
        content = file.read()
        complete = content.rfind(b"\n") + 1
        if complete < len(content):
            file.truncate(complete)
    # Not splitlines(), which also breaks at characters that JSON allows inside a text.
    for number, line in enumerate(content[:complete].split(b"\n")[:-1], start=1):
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{path}, line {number}: is damaged; remove the line to have it made again") from error
        if not isinstance(record, dict):
            raise ConfigError(f"{path}, line {number}: is damaged; remove the line to have it made again")
        yield number, record


def open_to_append(path: Path) -> IO[str]:
    """For :func:`append_lines`."""
    # A response may hold half of a surrogate pair, which strict UTF-8 refuses.
    return path.open("a", encoding="utf-8", errors="surrogatepass")


def append_lines(file: IO[str], records: Sequence[Mapping[str, Any]]) -> None:
    """Write records as JSON lines to an open text file, and hand them to the system."""
    file.write("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))
    file.flush()


def _sample_of(record: dict[str, Any], where: str) -> StoredSample:
    try:
        return StoredSample(**record)
    except TypeError as error:
        raise ConfigError(f"{where}: is no sample; remove the line to have it made again") from error


def _require_same(folder: Path, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    if names:
        differences = ", ".join(f"{name}={old.get(name)!r}, now {new.get(name)!r}" for name in names)
        raise ConfigError(f"{folder}: holds samples made with {differences}; {MEND}")


def _require_same_prompts(folder: Path, old: Sequence[str], new: Sequence[str]) -> None:
    differing = [index for index, (a, b) in enumerate(zip(old, new, strict=False)) if a != b]
    if differing:
        raise ConfigError(
            f"{folder}: holds samples for other prompts: {len(differing)} of {len(new)} differ, the first is problem "
            f"{differing[0]}; {MEND}"
        )


def _digest_tokens(ids: Sequence[int]) -> str:
    return hashlib.blake2b(",".join(map(str, ids)).encode(), digest_size=4).hexdigest()
