"""The responses on the page: compressed chunks, shortened until they fit."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from verl.evaluation.results import PROMPT_TOO_LONG, ProblemResult, ScoredSample, TaskResult, row_labels
from verl_pages.html import CHUNK_BYTES, ascii_json, pack

MAX_TEXT = 20_000
"""Characters of a question or an answer that are shown."""

PROBED = 64
"""Problems whose responses are compressed to estimate the size of all."""

SLACK = 1.1
"""Limits are not even tried if the estimate exceeds the room by more than this factor."""

VERDICT_CODES = {
    "correct": "c",
    "wrong": "w",
    "no_answer": "n",
    "unparsed": "u",
    "timeout": "t",
    "memory": "m",
    "crash": "x",
    "error": "e",
    PROMPT_TOO_LONG: "l",
}
OTHER_VERDICT = "o"

Places = list[list[list[list[int]]]]
"""``[benchmark][label]``: the chunks of a run, ``[first problem, end, number of the chunk]`` each."""


@dataclass(frozen=True)
class Limits:
    """How much of the responses a page shows."""

    characters: int
    """Longer responses lose their middle."""
    samples: int | None
    """Responses per problem; None: all."""

    def sentence(self) -> str:
        """What the reader must know about them."""
        parts = [f"Of responses longer than {self.characters:,} characters, this page shows the beginning and the end."]
        if self.samples == 0:
            parts = ["To keep the page small, responses are left out."]
        elif self.samples is not None:
            parts.append(f"To keep the page small, it has at most {self.samples} responses per problem and run.")
        return " ".join([*parts, "samples.parquet has all of them in full; all verdicts are here."])


NOTHING = Limits(0, 0)

LIMITS = (
    *(Limits(characters, None) for characters in (20_000, 8_000, 3_000)),
    *(Limits(3_000, samples) for samples in (128, 64, 32, 16)),
    Limits(1_500, 4),
    Limits(800, 1),
)
"""Tried in this order until the page is small enough; after the last comes ``NOTHING``."""


@dataclass(frozen=True)
class BenchmarkSamples:
    """The problems of a benchmark over all runs, and the samples that each run has of them."""

    name: str
    problems: list[ProblemResult]
    """Distinct problems; their samples are those of the last run that has them."""
    samples: list[list[list[ScoredSample]] | None]
    """``[label][problem]``; None for a run without this benchmark."""

    @classmethod
    def gather(cls, name: str, results: Sequence[TaskResult], labels: Sequence[str]) -> "BenchmarkSamples":
        mine = {
            label: {(p.index, p.question): p for p in result.problems}
            for label, result in zip(row_labels(results), results, strict=True)
            if result.benchmark == name
        }
        # Runs may have been evaluated on different versions of a benchmark: only equal texts are the same problem.
        problems = {key: problem for found in mine.values() for key, problem in found.items()}
        order = sorted(problems, key=lambda key: key[0])
        samples = [
            [mine[label][key].samples if key in mine[label] else [] for key in order] if label in mine else None
            for label in labels
        ]
        return cls(name, [problems[key] for key in order], samples)


def fit_responses(
    benchmarks: Sequence[BenchmarkSamples], metrics: Sequence[str], first: int, room: int
) -> tuple[Limits, Places, list[str]]:
    """The widest limits within which the responses fit into ``room`` bytes, their places and their chunks.

    Chunks are numbered from ``first``.
    """
    ratio = _packed_ratio(benchmarks)
    for limits in LIMITS:
        if ratio * _text_size(benchmarks, limits) <= SLACK * room:
            packed = _pack_responses(benchmarks, metrics, limits, first, room)
            if packed is not None:
                return limits, *packed
    return NOTHING, [[[] for _ in benchmark.samples] for benchmark in benchmarks], []


def _pack_responses(
    benchmarks: Sequence[BenchmarkSamples], metrics: Sequence[str], limits: Limits, first: int, room: int
) -> tuple[Places, list[str]] | None:
    """Places and chunks of the responses; None if they exceed ``room``."""
    chunks: list[str] = []
    places: Places = []
    for benchmark in benchmarks:
        places.append([])
        for run in benchmark.samples:
            places[-1].append([])
            for start, end, text in _chunks(run or [], metrics, limits):
                places[-1][-1].append([start, end, first + len(chunks)])
                chunks.append(pack(text))
                room -= len(chunks[-1]) + 80
                if room < 0:
                    return None
    return places, chunks


def _packed_ratio(benchmarks: Sequence[BenchmarkSamples]) -> float:
    """Bytes on the page per character of a response, from some responses of all benchmarks and runs."""
    everything = [samples for benchmark in benchmarks for run in benchmark.samples for samples in run or []]
    probed = everything[:: max(1, len(everything) // PROBED)]
    text = ascii_json([[sample.response[: LIMITS[0].characters] for sample in samples[:4]] for samples in probed])
    return len(pack(text)) / len(text)


def _text_size(benchmarks: Sequence[BenchmarkSamples], limits: Limits) -> int:
    """Characters of all responses within ``limits``."""
    return sum(
        min(len(samples[i].response), limits.characters)
        for benchmark in benchmarks
        for run in benchmark.samples
        for samples in run or []
        for i in _kept(samples, limits)
    )


def _chunks(
    run: Sequence[Sequence[ScoredSample]], metrics: Sequence[str], limits: Limits
) -> Iterator[tuple[int, int, str]]:
    """First problem, end and JSON of each chunk of a run's responses."""
    start, size = 0, 0
    parts: list[str] = []
    for i, samples in enumerate(run):
        parts.append(ascii_json(_problem_record(samples, metrics, limits)))
        size += len(parts[-1])
        if size >= CHUNK_BYTES or i == len(run) - 1:
            yield start, i + 1, f"[{','.join(parts)}]"
            start, size, parts = i + 1, 0, []


def _problem_record(samples: Sequence[ScoredSample], metrics: Sequence[str], limits: Limits) -> list[Any]:
    """One entry per sample, null if it is left out; a shortened response is two texts. Extras come last, if any.

    ``sampleView`` in browser.js reads the fields in this order.
    """
    record: list[Any] = [None] * len(samples)
    for i in _kept(samples, limits):
        sample = samples[i]
        text: str | list[str] = sample.response
        left_out = max(0, len(text) - limits.characters)
        if left_out:
            # The gap is in the middle: answers are at the end.
            head = limits.characters // 2
            text = [sample.response[:head], sample.response[head + left_out :]]
        figures = [sample.metrics.get(name) for name in metrics] if sample.metrics else None
        facts = [text, sample.num_tokens, int(sample.truncated), sample.answer[:MAX_TEXT], left_out, figures]
        record[i] = [*facts, dict(sample.extras)] if sample.extras else facts
    return record


def _kept(samples: Sequence[ScoredSample], limits: Limits) -> list[int]:
    """The samples that are shown: if not all, the first of each verdict and then the others in their order."""
    if limits.samples is None or len(samples) <= limits.samples:
        return list(range(len(samples)))
    first_of_verdict: dict[str, int] = {}
    for i, sample in enumerate(samples):
        first_of_verdict.setdefault(verdict_code(sample), i)
    return list(dict.fromkeys([*first_of_verdict.values(), *range(len(samples))]))[: limits.samples]


def verdict_code(sample: ScoredSample) -> str:
    return "c" if sample.correct else VERDICT_CODES.get(sample.reason, OTHER_VERDICT)
