"""Verdicts on stored samples. They are stored beside the samples, and made again when what they depend on changes.

The first line of ``verdicts.jsonl`` holds what the verdicts depend on: the verifiers' source and libraries, their
limits, and the problems' answers. Each verdict names the response it belongs to. Scoring never generates.
"""

import hashlib
import importlib.util
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import verl.rewards
from verl.config.errors import ConfigError
from verl.config.rewards import RewardScoreConfig
from verl.evaluation.benchmarks import Problem
from verl.evaluation.json_lines import append_lines, open_to_append, parse_record, read_lines
from verl.evaluation.results import PROMPT_TOO_LONG, ProblemResult, ScoredSample, TaskResult
from verl.evaluation.store import SampleKey, StoredSample
from verl.evaluation.tasks import EvaluationTask
from verl.rewards import Score
from verl.rewards.pool import VerifierPool

VERDICTS_FILE = "verdicts.jsonl"

BATCH_SIZE = 1024
"""Samples that are scored between two writes of their verdicts."""

LIBRARIES = ("math-verify", "latex2sympy2_extended", "sympy")
"""Libraries that verifiers compare answers with."""

OWN_REASONS = ("unparsed", "timeout", "memory", "crash", "error")
"""Verifiers' reasons that are kept as reason codes; any other reason for a wrong answer becomes ``wrong``."""


NOT_GENERATED = ScoredSample(
    response="", num_tokens=0, truncated=False, correct=False, answer="", reason=PROMPT_TOO_LONG
)
"""Stands for the samples of a problem whose prompt is longer than the model takes."""


@dataclass(frozen=True)
class StoredVerdict:
    """A verifier's verdict on one sample."""

    problem: int
    sample: int
    response: str
    """Digest of the response, which may have been generated again since."""
    correct: bool
    answer: str
    reason: str
    reward_extra_info: dict[str, Any]
    """What else a user's function returned."""


def score_samples(
    task: EvaluationTask, samples: Mapping[SampleKey, StoredSample], n: int, verifiers: VerifierPool
) -> TaskResult:
    """The result of a task whose samples are complete; verdicts that are missing or out of date are made.

    Raises:
        ConfigError: a user's own function failed, the verifiers could not be kept running, or a line of verdicts is
            damaged.
    """
    keys = [(i, j) for i in range(len(task.problems)) if i not in task.unanswered for j in range(n)]
    digests = {key: _digest(samples[key].response.encode(errors="surrogatepass")) for key in keys}
    with VerdictFile(task.folder / VERDICTS_FILE, verdict_settings(task.problems, verifiers.config)) as file:
        waiting = [key for key in keys if key not in file.verdicts or file.verdicts[key].response != digests[key]]
        for start in range(0, len(waiting), BATCH_SIZE):
            batch = waiting[start : start + BATCH_SIZE]
            problems = [task.problems[i] for i, _ in batch]
            try:
                scores = verifiers.score_batch(
                    [problem.data_source for problem in problems],
                    [samples[key].response for key in batch],
                    [problem.answer for problem in problems],
                    [problem.extra_info for problem in problems],
                    [task.opens_thought] * len(batch),
                )
            # CustomFunctionError is a RuntimeError, and so is what the pool raises if its processes keep dying.
            except (ValueError, RuntimeError) as error:
                raise ConfigError(f"{task.benchmark}: cannot be scored: {error}") from error
            file.append(
                [
                    StoredVerdict(
                        *key,
                        digests[key],
                        score["correctness"],
                        score["answer"],
                        reason_code(score),
                        score["reward_extra_info"],
                    )
                    for key, score in zip(batch, scores, strict=True)
                ]
            )
        verdicts = file.verdicts
    results = [
        ProblemResult(
            index=problem.index,
            question=problem.question,
            answer=problem.answer,
            samples=[
                _scored(samples[i, j], verdicts[i, j]) if i not in task.unanswered else NOT_GENERATED for j in range(n)
            ],
        )
        for i, problem in enumerate(task.problems)
    ]
    return TaskResult(task.target.run, task.target.step, task.benchmark, task.temperature, results)


class VerdictFile:
    """Verdicts on disk; a context manager. A file that was made with other settings is emptied."""

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        lines = list(read_lines(path))
        current = bool(lines) and lines[0][1] == settings
        stored = [parse_record(StoredVerdict, record, place) for place, record in lines[1:]] if current else []
        self.verdicts: dict[SampleKey, StoredVerdict] = {(v.problem, v.sample): v for v in stored}
        self._file = open_to_append(path)
        if not current:
            self._file.truncate(0)
            append_lines(self._file, [settings])

    def __enter__(self) -> "VerdictFile":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def append(self, verdicts: Sequence[StoredVerdict]) -> None:
        """Add verdicts and write them down."""
        self.verdicts |= {(v.problem, v.sample): v for v in verdicts}
        append_lines(self._file, [asdict(v) for v in verdicts])


def verdict_settings(problems: Sequence[Problem], config: RewardScoreConfig) -> dict[str, Any]:
    """Everything besides the responses that verdicts depend on."""
    sources = [Path(file) for package in verl.rewards.__path__ for file in sorted(Path(package).glob("*.*"))]
    sources += [path for path in map(_source_of, config.paths_of_custom_functions().values()) if path is not None]
    truths = [[problem.answer, problem.data_source, dict(problem.extra_info)] for problem in problems]
    return {
        "verifiers": _digest(b"".join(path.read_bytes() for path in sources)),
        "libraries": {name: version(name) for name in LIBRARIES},
        "problems": _digest(json.dumps(truths, sort_keys=True).encode()),
        "timeout_s": config.timeout_s,
        "memory_limit_mb": config.memory_limit_mb,
        "custom_functions": config.custom_functions,
        "custom_kwargs": config.custom_kwargs,
    }


def _source_of(path: str) -> Path | None:
    """The file of ``module:function`` or ``file.py:function``."""
    module = path.rpartition(":")[0]
    if module.endswith(".py"):
        return Path(module)
    spec = importlib.util.find_spec(module)
    return Path(spec.origin) if spec is not None and spec.origin is not None else None


def reason_code(score: Score) -> str:
    """One of ``verl.evaluation.results.REASONS``."""
    if score["correctness"]:
        return "correct"
    if score["reason"] == "missing":
        return "no_answer"
    return score["reason"] if score["reason"] in OWN_REASONS else "wrong"


def _scored(sample: StoredSample, verdict: StoredVerdict) -> ScoredSample:
    return ScoredSample(
        response=sample.response,
        num_tokens=sample.num_tokens,
        truncated=sample.truncated,
        correct=verdict.correct,
        answer=verdict.answer,
        reason=verdict.reason,
        metrics=sample.metrics,
        extras=verdict.reward_extra_info,
    )


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()
