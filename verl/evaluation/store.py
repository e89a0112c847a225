"""Samples on disk, written as they arrive, so that an interrupted evaluation can resume.

A folder holds the samples of one model on one benchmark at one temperature::

    generation.json    the settings that the samples depend on, and a digest of every prompt
    samples.jsonl      one line per sample
"""

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from verl.config.errors import ConfigError
from verl.evaluation.json_lines import AppendFile, parse_record, read_lines
from verl.utils.files import replace_text

SETTINGS_FILE = "generation.json"
SAMPLES_FILE = "samples.jsonl"

FIX = "name another trainer.default_local_dir, or remove that folder"

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
    """Rank metrics by name; empty if none were measured."""
    token_ids: list[int] = field(default_factory=list)
    """Empty where they are not kept."""

    def record(self) -> dict[str, Any]:
        """The line of the file."""
        return {name: value for name, value in asdict(self).items() if name != "token_ids" or value}


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
            except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
                raise ConfigError(f"{path} is damaged; {FIX}") from error
            if not isinstance(old_settings, dict) or not isinstance(old_digests, list):
                raise ConfigError(f"{path} is damaged; {FIX}")
            names = [n for n in {**old_settings, **settings} if not _same(old_settings.get(n), settings.get(n))]
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


def _same(old: Any, new: Any) -> bool:
    """Whether a setting is unchanged. Of a group, options that only earlier versions had do not count."""
    if isinstance(old, dict) and isinstance(new, dict):
        return all(name in old and old[name] == value for name, value in new.items())
    return bool(old == new)


def _digest(ids: Sequence[int]) -> str:
    return hashlib.blake2b(",".join(map(str, ids)).encode(), digest_size=4).hexdigest()
