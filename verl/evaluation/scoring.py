"""Verdicts on stored samples. They are kept beside the samples, and made anew when what they depend on changes.

``verdicts.jsonl`` begins with a line that says what the verdicts depend on: the verifiers' source and libraries, their
limits, and the problems' answers. Each verdict names the response that it is on. Scoring never generates.
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
from verl.config.signal import RewardScoreConfig
from verl.evaluation.benchmarks import Problem
from verl.evaluation.generation import Work
from verl.evaluation.results import EvaluatedProblem, RunResult, Sample
from verl.evaluation.store import SampleKey, StoredSample, append_lines, open_to_append, read_lines
from verl.rewards import Score
from verl.rewards.pool import VerifierPool

VERDICTS_FILE = "verdicts.jsonl"

BATCH_SIZE = 1024
"""Samples between two writes of their verdicts."""

LIBRARIES = ("math-verify", "latex2sympy2_extended", "sympy")
"""What verifiers compare answers with."""

OWN_REASONS = ("unparsed", "timeout", "memory", "crash")
"""Verifiers' reasons that are reason codes as they are; any other for a wrong answer is ``wrong``."""


@dataclass(frozen=True)
class StoredVerdict:
    """What a verifier said of one sample."""

    problem: int
    sample: int
    response: str
    """Digest of the response, which may have been generated anew since."""
    correct: bool
    answer: str
    reason: str


def score(work: Work, n: int, verifiers: VerifierPool) -> RunResult:
    """The result of a job whose samples are all there: verdicts that are missing, or out of date, are made.

    Raises:
        ConfigError: a user's own function failed, the verifiers could not be kept running, or a verdict's line is
            damaged.
    """
    job, samples = work.job, work.store.samples
    keys = [(i, j) for i in range(len(job.problems)) for j in range(n)]
    with VerdictFile(work.store.folder / VERDICTS_FILE, verdict_settings(job.problems, verifiers.config)) as file:
        digests = {key: _digest(samples[key].response.encode(errors="surrogatepass")) for key in keys}
        waiting = [key for key in keys if key not in file.verdicts or file.verdicts[key].response != digests[key]]
        for start in range(0, len(waiting), BATCH_SIZE):
            batch = waiting[start : start + BATCH_SIZE]
            try:
                scores = verifiers.score_batch(
                    [job.problems[i].data_source for i, _ in batch],
                    [samples[key].response for key in batch],
                    [job.problems[i].answer for i, _ in batch],
                    [job.problems[i].extra_info for i, _ in batch],
                )
            # The pool raises RuntimeError where its processes die again and again, as CustomFunctionError is one.
            except (ValueError, RuntimeError) as error:
                raise ConfigError(f"{job.benchmark}: cannot be scored: {error}") from error
            file.append([_verdict(key, digests[key], verdict) for key, verdict in zip(batch, scores, strict=True)])
        verdicts = file.verdicts
    problems = [
        EvaluatedProblem(
            index=problem.index,
            question=problem.question,
            answer=problem.answer,
            samples=[_judged(samples[i, j], verdicts[i, j]) for j in range(n)],
        )
        for i, problem in enumerate(job.problems)
    ]
    return RunResult(job.target.run, job.target.step, job.benchmark, job.temperature, problems)


class VerdictFile:
    """Verdicts on disk; a context manager. A file made with other settings is emptied."""

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.verdicts: dict[SampleKey, StoredVerdict] = {}
        lines = [record for _, record in read_lines(path)]
        if lines and lines[0] == settings:
            for record in lines[1:]:
                verdict = _stored_verdict(record, path)
                self.verdicts[verdict.problem, verdict.sample] = verdict
            self._file = open_to_append(path)
        else:
            path.unlink(missing_ok=True)
            self._file = open_to_append(path)
            append_lines(self._file, [settings])

    def __enter__(self) -> "VerdictFile":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def append(self, verdicts: Sequence[StoredVerdict]) -> None:
        """Add verdicts and write them down."""
        self.verdicts |= {(verdict.problem, verdict.sample): verdict for verdict in verdicts}
        append_lines(self._file, [asdict(verdict) for verdict in verdicts])


def verdict_settings(problems: Sequence[Problem], config: RewardScoreConfig) -> dict[str, Any]:
    """What verdicts depend on besides the responses."""
    sources = [Path(file) for package in verl.rewards.__path__ for file in sorted(Path(package).glob("*.py"))]
    sources += [path for path in map(_source_of, config.paths_of_custom_functions().values()) if path is not None]
    truths = [[problem.answer, problem.data_source, dict(problem.extra_info)] for problem in problems]
    return {
        "verifiers": _digest(b"".join(path.read_bytes() for path in sources)),
        "libraries": {name: version(name) for name in LIBRARIES},
        "problems": _digest(json.dumps(truths, sort_keys=True).encode()),
        "timeout_s": config.timeout_s,
        "memory_limit_mb": config.memory_limit_mb,
        "custom_functions": config.custom_functions,
    }


def _source_of(path: str) -> Path | None:
    """The file of ``module:function``."""
    spec = importlib.util.find_spec(path.partition(":")[0])
    return Path(spec.origin) if spec is not None and spec.origin is not None else None


def _verdict(key: SampleKey, response: str, score: Score) -> StoredVerdict:
    correct, answer = score["correctness"], score["answer"]
    return StoredVerdict(*key, response, correct=correct, answer=answer, reason=reason_code(score))


def reason_code(score: Score) -> str:
    """One of ``verl.evaluation.results.REASONS``."""
    if score["correctness"]:
        return "correct"
    if score["reason"] == "missing":
        return "no_answer"
    return score["reason"] if score["reason"] in OWN_REASONS else "wrong"


def _stored_verdict(record: dict[str, Any], path: Path) -> StoredVerdict:
    try:
        return StoredVerdict(**record)
    except TypeError as error:
        raise ConfigError(f"{path}: is damaged; remove it to have the verdicts made again") from error


def _judged(sample: StoredSample, verdict: StoredVerdict) -> Sample:
    return Sample(
        response=sample.response,
        num_tokens=sample.num_tokens,
        truncated=sample.truncated,
        correct=verdict.correct,
        answer=verdict.answer,
        reason=verdict.reason,
        metrics=sample.metrics,
    )


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()
